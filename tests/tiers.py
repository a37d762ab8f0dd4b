"""tiers: each case of the tests -> the tier that it belongs to, and which cases a tier plays.

    fast < test < nightly       `pytest --tier test` plays `fast` and `test`; without the option every case is played

A case says its tier by a mark: of its module (`pytestmark = pytest.mark.fast`), or of its own, which is nearer and counts.
A file that names no tier to be played is not even imported, so that `make fast` waits for no torch, Ray or vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

TIERS = {
    "fast": "before each commit: no Ray, no engine, no server; torch only where the mathematics is",
    "test": "each push: one of each real part",
    "nightly": "each day: everything else",
}
EVERYTHING = "nightly"


def played(tier: str) -> tuple[str, ...]:
    """The tiers that `tier` plays: itself and those before it."""
    names = list(TIERS)
    return tuple(names[: names.index(tier) + 1])


def tier_of(item: pytest.Item) -> str:
    """The tier of a case: that of the nearest mark. Raises ValueError for a case without one, or with two at one place."""
    for node in reversed(item.listchain()):  # the case, its class, its module
        tiers = sorted({mark.name for mark in node.own_markers} & TIERS.keys())
        if len(tiers) > 1:
            raise ValueError(f"{node.nodeid} is marked {' and '.join(tiers)}: a case is in one tier")
        if tiers:
            return tiers[0]
    raise ValueError(f"{item.nodeid} is in no tier: mark it, or its module, with one of {', '.join(TIERS)}")


def is_played(item: pytest.Item, tier: str) -> bool:
    """Whether `tier` plays a case. One whose mark is wrong is always played, so that it fails and says so."""
    try:
        return tier_of(item) in played(tier)
    except ValueError:
        return True


def is_left_out(path: Path, tier: str) -> bool:
    """Whether all tiers that a file of tests names are ones that `tier` does not play; read from its source, unimported."""
    named = _marks(ast.parse(path.read_text())) & TIERS.keys()
    return bool(named) and not named & set(played(tier))


def _marks(tree: ast.AST) -> set[str]:
    """Names of all `pytest.mark.NAME` in a piece of source."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    }


def each_push(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Returns every name as a parameter; those that are not chosen are played by `make nightly` only."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.nightly) for name in names]
