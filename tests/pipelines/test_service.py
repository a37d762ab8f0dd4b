"""Which team a rollback goes to. The move itself, with engines, is in tests/e2e/test_airflow.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines import service
from pipelines.config import load_config
from pipelines.run import Run

SMALL = Path(__file__).parents[1] / "e2e" / "small.yaml"


class Moved(Exception):
    """The version that a rollback would move to."""


def rolled_back(folder: Path, monkeypatch: pytest.MonkeyPatch, champions: list[int], to: int | None = None) -> int:
    run = Run(load_config(SMALL, {"storage.root": str(folder)}))
    run.journal.put_value("small", "champion", {"team_version": champions[-1], "models": {}})
    run.journal.put_value("small", "champions", {"history": [{"team_version": v} for v in champions]})

    def move(run: Run, version: int, *, reason: str) -> dict[str, Any]:
        raise Moved(version)

    monkeypatch.setattr(service, "promote_version", move)
    with pytest.raises(Moved) as moved:
        service.rollback(run, to=to, reason="test")
    return int(moved.value.args[0])


@pytest.mark.parametrize(
    ("champions", "expected"),
    [([1, 2, 3], 2), ([1, 2, 3, 2], 1), ([1, 2, 3, 2, 4], 2)],
    ids=["the one before", "twice in a row goes two back", "a new one after a rollback"],
)
def test_a_rollback_goes_to_the_champion_that_the_present_one_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, champions: list[int], expected: int
) -> None:
    assert rolled_back(tmp_path, monkeypatch, champions) == expected


def test_a_rollback_may_name_an_earlier_champion_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rolled_back(tmp_path, monkeypatch, [1, 2, 3], to=1) == 1
    with pytest.raises(ValueError, match=r"7 of 'small' never was champion \(these were: 1, 2, 3\)"):
        rolled_back(tmp_path, monkeypatch, [1, 2, 3], to=7)
    with pytest.raises(ValueError, match="had no champion before 1"):
        rolled_back(tmp_path, monkeypatch, [1])
