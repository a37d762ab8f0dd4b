"""Python's text is parsed, whatever a garbage collection does meanwhile."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest

from stores.syntax_trees import parse_python

pytestmark = pytest.mark.fast

SOURCE = "\n".join(f"def f{i}(a, b=[1, 2, 3]):\n    return a + b[{i}]" for i in range(300))


class ParsesAtItsEnd:
    """Garbage of which a collection parses, at another depth."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        _parse_deep(20)


def _parse_deep(depth: int) -> None:
    if depth:
        _parse_deep(depth - 1)
    else:
        ast.parse("x = [1]")


@pytest.fixture
def frequent_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("frequent_collections")
def test_a_collection_that_parses_does_not_end_a_parse() -> None:
    num_failed = 0
    for _ in range(20):
        [ParsesAtItsEnd() for _ in range(5)]
        try:
            ast.parse(SOURCE)
        except SystemError:
            num_failed += 1
        [ParsesAtItsEnd() for _ in range(5)]
        assert ast.dump(parse_python(SOURCE)) == ast.dump(parse_python(SOURCE))
    if not num_failed:
        pytest.skip("this Python's parser does not fail where a collection parses")


def test_what_is_no_python_is_refused_as_ever() -> None:
    with pytest.raises(SyntaxError):
        parse_python("f(")
    assert isinstance(parse_python("1 + 1", "eval").body, ast.BinOp)
