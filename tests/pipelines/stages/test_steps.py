"""A stage that is done by itself, with overlap: it waits for whoever is at an earlier iteration, and does what was left there."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.run import iterations
from pipelines.run.iteration import NotDone
from pipelines.run.run import Run
from pipelines.stages import steps
from pipelines.stages.table import STAGES, Step
from stores.journal.journal import Lease
from stores.journal.stage_results import Scored

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
RECORDS = {
    "collect": collected,
    "score": scored,
    "train": lambda: trained("team"),
    "sync": synced,
    "evaluate": evaluated,
    "promote": decided,
}


def run_in(folder: Path, *, max_lag: int = 1, **changes: Any) -> Run:
    return Run(load_config(SMALL, {"storage.root": str(folder), "loop.max_lag": max_lag, **changes}))


@pytest.fixture
def done_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages are recorded instead of done; returns their names in order."""
    names: list[str] = []

    def run_stage(run: Run, stage: str, iteration: int, *, model_group: str = "", progress: Any = None) -> None:
        names.append(f"{stage} {iteration}")
        finish(run, iteration, RECORDS[stage](), model_group)

    monkeypatch.setattr(steps, "run_stage", run_stage)
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    return names


def settle(run: Run, stage: str, iteration: int) -> None:
    steps.settle(run, Step(iteration, stage), steps.do_step)


def left_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "QUIET_S", 0.0)


def test_what_is_undone_below_a_step_is_done_in_order_and_once(tmp_path: Path, done_here: list[str]) -> None:
    run = run_in(tmp_path, max_lag=0)
    finish(run, 1, collected())
    for _ in range(2):
        steps.complete(run, Step(1, "promote"), steps.do_step)
    assert done_here == ["score 1", "train 1", "sync 1", "evaluate 1", "promote 1"]


def test_a_stage_is_given_its_iteration_as_it_was_when_the_stage_began(tmp_path: Path) -> None:
    run = run_in(tmp_path, max_lag=0)
    for record in (collected(num_new=1), scored()):
        finish(run, 1, record)
    finish(run, 3, collected(num_new=3))
    begun = steps.begin(run, STAGES["score"], 3)
    finish(run, 3, scored())
    assert (begun.number, begun.collected.num_new, begun.find(Scored)) == (3, 3, None)
    assert [earlier.number for earlier in begun.before] == [2, 1], "as far as the last one that was scored"
    with pytest.raises(NotDone, match=r"score of iteration 2 of run 'small' needs collect, which is not done"):
        steps.begin(run, STAGES["score"], 2)


def test_without_lag_nothing_is_waited_for_or_done(tmp_path: Path, done_here: list[str]) -> None:
    settle(run_in(tmp_path, max_lag=0), "evaluate", 3)
    assert done_here == []


def test_what_an_ended_dag_run_left_is_done_in_order(
    tmp_path: Path, done_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_long_ago(monkeypatch)
    run = run_in(tmp_path)
    finish(run, 1, collected())
    finish(run, 1, scored())
    finish(run, 2, collected())
    settle(run, "score", 2)
    assert done_here == []
    settle(run, "train", 2)
    assert done_here == ["train 1"]
    settle(run, "evaluate", 2)
    assert done_here[1:] == ["sync 1", "evaluate 1", "promote 1"]
    settle(run, "evaluate", 2)
    assert len(done_here) == 4


def test_what_is_missing_in_its_own_iteration_is_for_the_stage_to_say(
    tmp_path: Path, done_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_long_ago(monkeypatch)
    settle(run_in(tmp_path), "train", 1)
    assert done_here == []


def test_after_a_return_to_the_champion_training_waits_for_the_gate(
    tmp_path: Path, done_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_long_ago(monkeypatch)
    run = run_in(tmp_path, **{"promote.on_reject": "champion"})
    for record in (collected(), scored()):
        finish(run, 1, record)
    finish(run, 2, collected())
    settle(run, "train", 2)
    assert done_here == ["train 1", "sync 1", "evaluate 1", "promote 1"]


def test_a_stage_that_somebody_is_at_is_waited_for(tmp_path: Path, done_here: list[str]) -> None:
    run = run_in(tmp_path)
    for record in (collected(), scored()):
        finish(run, 1, record)
    begun, may_end = threading.Event(), threading.Event()

    def work(lease: Lease) -> dict[str, Any]:
        begun.set()
        assert may_end.wait(20)
        return trained("team").to_json()

    other = threading.Thread(target=run_in(tmp_path).journal.once, args=(run.key(1, "train", "team"), work))
    other.start()
    assert begun.wait(20)
    waiting = threading.Thread(target=settle, args=(run, "train", 2))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive(), "train 2 did not wait for train 1"
    may_end.set()
    waiting.join(20)
    other.join(20)
    assert not waiting.is_alive() and done_here == []


def test_whoever_is_between_two_stages_is_not_overtaken(tmp_path: Path, done_here: list[str]) -> None:
    run = run_in(tmp_path)
    finish(run, 1, collected())  # just now: its DAG run goes on with score
    waiting = threading.Thread(target=settle, args=(run, "score", 2))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive() and done_here == []
    finish(run, 1, scored())
    waiting.join(20)
    assert not waiting.is_alive() and done_here == []


def test_what_is_done_for_others_is_done_without_another_wait(
    tmp_path: Path, done_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, **{"promote.on_reject": "champion"})
    for record in (collected(), scored()):
        finish(run, 1, record)
    finish(run, 2, collected())
    now = time.time()
    monkeypatch.setattr(iterations.time, "time", lambda: now + iterations.QUIET_S + 1)
    began = time.monotonic()
    settle(run, "train", 2)
    assert done_here == ["train 1", "sync 1", "evaluate 1", "promote 1"] and time.monotonic() - began < 10


def test_an_iteration_that_waits_for_another_is_under_way(tmp_path: Path, done_here: list[str]) -> None:
    run = run_in(tmp_path)
    finish(run, 1, collected())
    waiting = threading.Thread(target=settle, args=(run, "score", 2))
    waiting.start()
    time.sleep(0.3)
    assert iterations.is_under_way(run, 2)
    finish(run, 1, scored())
    waiting.join(20)


def test_an_iteration_may_not_begin_before_its_time(tmp_path: Path, done_here: list[str]) -> None:
    with pytest.raises(
        NotDone, match=r"iteration 4 .* may not begin yet: iteration 1 is not done, .* no later one than 2"
    ):
        settle(run_in(tmp_path), "collect", 4)
    assert done_here == []
