"""Dotted paths and settings of a config: what opens, and that what does not is one line with place and fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from stores.by_name import check_settings, construct, open_by_name

pytestmark = pytest.mark.fast


@dataclass
class Rule:
    """A class that a config may name."""

    mode: Literal["sum", "mean"]
    rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    agents: Sequence[str] = ()
    count: int | None = None
    embed: Callable[[str], str] | None = None
    parts: Mapping[str, float] | None = None
    limit: float = None  # type: ignore[assignment]
    kinds: type[int] | None = None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "sum", "rat": 1}, r"here: unknown key 'rat': did you mean 'rate'\?"),
        (
            {"mode": "sum", "zzz": 1},
            "here: unknown key 'zzz': Rule takes mode, rate, agents, count, embed, parts, limit, kinds",
        ),
        ({}, "here: 'mode' missing: Rule needs it"),
        ({"mode": "max"}, r"here\.mode: Input should be 'sum' or 'mean' \(got 'max'\)"),
        ({"mode": "sum", "rate": 2}, r"here\.rate: Input should be less than or equal to 1 \(got 2"),
        ({"mode": "sum", "rate": "0.5"}, r"here\.rate: Input should be a valid number \(got '0\.5'\)"),
        ({"mode": "sum", "rate": float("nan")}, r"here\.rate: nan is no finite number: give one"),
        ({"mode": "sum", "count": True}, r"here\.count: Input should be a valid integer \(got True\)"),
        ({"mode": "sum", "agents": "solver"}, r"here\.agents: Input should be a valid array \(got 'solver'\)"),
        ({"mode": "sum", "agents": ["a", 3]}, r"here\.agents\.1: Input should be a valid string \(got 3\)"),
        ({"mode": "sum", "parts": {"a": "b"}}, r"here\.parts\.a: Input should be a valid number \(got 'b'\)"),
    ],
)
def test_settings_that_a_class_does_not_take_are_refused_with_place_and_fix(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(Rule, settings, place="here")


def test_settings_are_read_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer fits a number, a list a sequence; what cannot be written in a config is not judged."""
    check_settings(Rule, {"mode": "sum", "rate": 1, "agents": ["a"], "count": None, "embed": str}, place="here")
    check_settings(
        Rule, {"mode": "sum", "limit": None, "embed": "my:f", "kinds": "my:Kind", "count": 2.0}, place="here"
    )
    check_settings(lambda **anything: anything, {"a": object()}, place="here")
    check_settings(lambda a: a, {"a": {"of": "any"}}, place="here")


def test_what_is_not_known_of_parameters_is_not_judged() -> None:
    def shaped(rate: "shape [B, T]") -> None:  # noqa: F821, UP037
        ...

    check_settings(shaped, {"rate": 0.5}, place="here")
    assert construct("builtins:dict", {"a": 1}, place="here") == {"a": 1}


def test_what_a_decorator_supplies_is_not_missing() -> None:
    def make(rate: float, extra: object) -> tuple[float, object]:
        return rate, extra

    @wraps(make)
    def supplied(*arguments: Any, **settings: Any) -> tuple[float, object]:
        return make(*arguments, extra=3, **settings)

    check_settings(supplied, {"rate": 0.5}, place="here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import of_nobody", r"here: cannot import 'a_rule' \(No module named 'of_nobody'\)"),
        ("x = 1\n1 / 0", r"here: 'a_rule:Rule' does not load \(ZeroDivisionError: .*, a_rule\.py line 2\)"),
        ("def later(:", r"SyntaxError: invalid syntax \(a_rule\.py, line 1\)"),
        (
            "import torch\nRule = int",
            r"importing 'a_rule' \(.*a_rule\.py\) loads torch, .*: import it within the function",
        ),
        ("Rule = 3", r"here: 'a_rule:Rule' is of type int, and must be a rule"),
        ("Role = int", r"'a_rule' \(.*a_rule\.py\) has no 'Rule'; did you mean 'Role'"),
    ],
)
def test_what_does_not_open_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "a_rule.py").write_text(text)
    (tmp_path / "torch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name == "a_rule" or name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    for _ in range(2):  # a module that was refused is in memory, and refused again
        with pytest.raises(ValueError, match=message):
            open_by_name("a_rule:Rule", place="here", wanted="a rule", fits=callable, is_parsing=True)
    sys.modules.pop("torch", None)


def test_a_path_of_another_form_is_refused() -> None:
    for path in ("module.Name", ":Name", "module:", "..x:Name", "/tmp/x:Name", "a**:b", "x\0y:Name"):
        with pytest.raises(ValueError, match=r"here: .* is not of the form 'package\.module:Name'"):
            open_by_name(path, place="here")


def test_an_error_of_the_users_constructor_is_one_line_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule.py").write_text("class Rule:\n    def __init__(self, a):\n        {}[a]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"credit: 'own_rule:Rule' does not load \(KeyError: 'x', own_rule\.py line 3\)"
    ):
        construct("own_rule:Rule", {"a": "x"}, place="credit")
