"""Prometheus is told of the champion wherever it moves, and a cluster that fails meanwhile fails no move."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import collected, finish

from pipelines.config.run_config import load_config
from pipelines.extensions.prometheus import points as sending
from pipelines.run.champions import champion_version, followed, history, set_champion
from pipelines.run.run import Run
from pipelines.stages.steps import run_stage
from stores.journal.journal import Journal
from stores.journal.run_values import RunValue

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"


class Sent(list[tuple[str, float]]):
    """The champions that were sent, by run."""

    def take(self, points: list[Any], key: str = "") -> None:
        self += [(tags["run"], value) for name, value, tags in points if name == "troupe_champion_version"]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr(sending, "send", sent.take)
    return sent


@pytest.fixture
def run(tmp_path: Path) -> Any:
    registry = SimpleNamespace(set_alias=lambda *args: None, remove_alias=lambda *args: None)
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    return SimpleNamespace(run_id="r", team_name="r", journal=journal, registry=registry)


def test_each_move_of_the_champion_is_sent(run: Any, sent: Sent) -> None:
    set_champion(run, {}, 1, reason="the first team")
    set_champion(run, {}, 2, reason="by hand")
    set_champion(run, {}, 1, reason="sent back: slower", is_rollback=True)
    assert sent == [("r", 1), ("r", 2), ("r", 1)]


def test_a_cluster_that_goes_away_fails_no_move(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ConnectionError("no GCS")

    monkeypatch.setattr(sending, "send", fail)
    for version in (1, 2):
        set_champion(run, {}, version, reason="")
    assert (champion_version(run), followed(history(run))) == (2, 1)


def test_the_end_of_a_stage_sends_the_present_champion(tmp_path: Path, sent: Sent) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    finish(run, 1, collected())
    run_stage(run, "collect", 1)
    assert sent == []
    run.journal.put_value(run.run_id, RunValue.CHAMPION, {"team_version": 3, "models": {}})
    run_stage(run, "collect", 1)
    assert sent == [("small", 3)]
