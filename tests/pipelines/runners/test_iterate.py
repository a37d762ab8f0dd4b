"""An iteration in one process: what it hands on, in which order, and what is left where a stage fails. Stages are only recorded."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners import schedule
from pipelines.runners.schedule import Asks
from pipelines.stages.table import Step

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
RECORDS = {"collect": collected, "score": scored, "sync": synced, "evaluate": evaluated, "promote": decided}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def record_iteration(run: Run, iteration: int, **_: Any) -> dict[str, Any]:
        return {"report": f"report of {iteration}"}

    monkeypatch.setattr(schedule, "record_iteration", record_iteration)
    return Run(load_config(SMALL, {"storage.root": str(tmp_path), "model_groups": GROUPS}))


def do_step(run: Run, step: Step, *, failing: str = "", turn: Any = lambda group: nullcontext(True)) -> None:
    for group in GROUPS if step.stage == "train" else ("",):
        if group and group == failing:
            raise RuntimeError(f"{group} diverged")
        with turn(group) as is_wanted:
            if is_wanted:
                finish(run, step.iteration, trained(group) if group else RECORDS[step.stage](), group)


def test_each_stage_hands_on_its_result_in_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "do_step", do_step)
    parts = dict(schedule.iterate(run, 1, address="", screen=Screen()))
    assert list(parts) == ["collect", "score", "train/a", "train/b", "sync", "evaluate", "promote", "record"]
    assert parts["train/b"]["model"]["model_group"] == "b" and parts["score"]["outcome"] == 0.5
    assert parts["record"] == {"report": "report of 1"}


def test_a_model_group_that_is_trained_hands_on_its_result_though_another_one_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "do_step", partial(do_step, failing="b"))
    parts = []
    with pytest.raises(RuntimeError, match="b diverged"):
        for part, _ in schedule.iterate(run, 1, address="", screen=Screen()):
            parts.append(part)
    assert parts == ["collect", "score", "train/a"]


def test_a_stage_is_done_when_it_is_asked_for_and_not_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "do_step", do_step)
    asked: set[str] = set()
    parts = schedule.iterate(run, 1, address="", screen=Screen(), asks=Asks(asked.__contains__, idle_s=30))
    for wanted in ("collect", "score"):
        found: list[str] = []
        thread = threading.Thread(target=lambda found=found: found.append(next(parts)[0]))
        thread.start()
        thread.join(3 * schedule.POLL_S)
        assert not found and run.journal.ref(run.key(1, wanted)) is None
        asked.add(wanted)
        thread.join(10)
        assert found == [wanted]


def test_where_nobody_asks_the_job_ends_and_leaves_the_rest(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "do_step", do_step)
    asks = Asks({"collect", "score", "train/a"}.__contains__, idle_s=0.5)
    parts = [part for part, _ in schedule.iterate(run, 1, address="", screen=Screen(), asks=asks)]
    assert parts == ["collect", "score", "train/a"], "model group b was not asked for"
    assert "nobody asked for train of iteration 1" in capsys.readouterr().out
    later = dict(schedule.iterate(run, 1, address="", screen=Screen(), asks=Asks({"train/b"}.__contains__, idle_s=0.5)))
    assert list(later) == ["collect", "score", "train/a", "train/b"], (
        "what is done is handed on without being asked for"
    )


def test_the_wait_for_one_part_goes_on_while_another_is_at_work() -> None:
    asked, ended = {"train/a"}, []
    asks = Asks(asked.__contains__, idle_s=0.3)

    def other() -> None:
        with asks.turn("train/b") as is_asked:
            ended.append((is_asked, time.monotonic()))

    with asks.turn("train/a") as is_asked:
        assert is_asked
        waiting = threading.Thread(target=other)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
        at = time.monotonic()
    waiting.join(5)
    assert ended and not ended[0][0] and ended[0][1] > at + 0.3
