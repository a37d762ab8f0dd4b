"""syntax_trees: the text of Python -> its syntax tree. Standard library only."""

from __future__ import annotations

import ast
from typing import Any

ATTEMPTS = 8


def parse_python(text: str, mode: str = "exec") -> Any:
    """Returns what `ast.parse` does, and raises what it raises for a text that is not Python.

    CPython counts the depth of a tree in a place that all parsers of a process share. A garbage collection in the middle may run
    code that parses, or let another thread do so, and this text then ends in SystemError ("recursion depth mismatch",
    https://github.com/python/cpython/issues/106905), which says nothing about it: it is parsed again.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return ast.parse(text, mode=mode)
        except SystemError:
            continue
    return ast.parse(text, mode=mode)
