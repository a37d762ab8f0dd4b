"""Two lanes: what each does in which order, that they overlap, and how failures and interrupts end both."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.runners import local_runner
from pipelines.runners.local_runner import walk
from pipelines.stages import steps
from pipelines.stages.table import Step
from stores.journal.run_values import RunValue
from tests.waits import wait_until

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUP = "team"
RECORDS = {
    "collect": collected,
    "score": scored,
    "train": lambda: trained(GROUP),
    "sync": synced,
    "evaluate": evaluated,
    "promote": decided,
}


def opened(folder: Path, **changes: object) -> Run:
    return Run(load_config(SMALL, {"storage.root": str(folder), "iterations": 4, "loop.max_lag": 1, **changes}))


class Stages:
    """Notes which stages were done by which lane; `waits` may hold one up or have it fail."""

    def __init__(self) -> None:
        self.engines: list[str] = []
        self.trainers: list[str] = []
        self.promoted: list[int] = []
        self.begun: set[str] = set()

    def do(self, run: Run, step: Step) -> None:
        name = f"{step.stage} {step.iteration}"
        self.begun.add(name)
        self.held_up(name)
        is_main = threading.current_thread() is threading.main_thread()
        (self.engines if is_main else self.trainers).append(name)
        finish(run, step.iteration, RECORDS[step.stage](), GROUP if step.stage == "train" else "")

    def held_up(self, name: str) -> None:
        """Nothing is."""


def test_engines_and_trainers_each_keep_their_order(tmp_path: Path) -> None:
    stages = Stages()
    walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert stages.engines[:7] == ["collect 1", "collect 2", "sync 1", "evaluate 1", "promote 1", "collect 3", "sync 2"]
    assert stages.trainers == [f"{stage} {k}" for k in (1, 2, 3, 4) for stage in ("score", "train")]
    assert stages.promoted == [1, 2, 3, 4]


def test_where_a_rejection_returns_to_the_champion_training_waits_for_the_gate(tmp_path: Path) -> None:
    stages = Stages()
    walk(
        opened(tmp_path, **{"promote.on_reject": "champion"}),
        [1, 2, 3, 4],
        stages.do,
        promoted=lambda k: stages.trainers.append(f"promote {k}"),
    )
    for k in (2, 3, 4):
        assert stages.trainers.index(f"promote {k - 1}") < stages.trainers.index(f"train {k}")


def test_the_next_iteration_is_collected_while_this_one_trains(tmp_path: Path) -> None:
    stages = Stages()

    def held_up(name: str) -> None:
        if name == "train 2":  # is not done before collect 3 is
            wait_until(lambda: "collect 3" in stages.engines, timeout_s=20)

    stages.held_up = held_up  # type: ignore[method-assign]
    walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert stages.promoted == [1, 2, 3, 4]


def test_a_run_that_was_stopped_goes_on_with_what_is_unfinished(tmp_path: Path) -> None:
    stages, run = Stages(), opened(tmp_path)
    for step in (Step(k, stage) for k in (1, 2) for stage in RECORDS):
        finish(run, step.iteration, RECORDS[step.stage](), GROUP if step.stage == "train" else "")
    walk(run, [3, 4], stages.do, promoted=stages.promoted.append)
    assert stages.engines[:4] == ["collect 3", "collect 4", "sync 3", "evaluate 3"]
    assert stages.trainers == ["score 3", "train 3", "score 4", "train 4"]
    assert stages.promoted == [3, 4]


@pytest.mark.parametrize("failing", ["train 2", "collect 3", "score 1"])
def test_a_failure_in_either_lane_ends_both(tmp_path: Path, failing: str) -> None:
    stages = Stages()

    def held_up(name: str) -> None:
        if name == failing:
            raise ValueError(f"{name} fails")

    stages.held_up = held_up  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"{failing} fails"):
        walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert 4 not in stages.promoted and not any(t.name.startswith("trainers") for t in threading.enumerate())


def test_ctrl_c_ends_a_trainer_that_would_go_on(tmp_path: Path) -> None:
    stages = Stages()
    interrupted = threading.Event()

    def held_up(name: str) -> None:
        if name == "train 1":
            try:
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                interrupted.set()
                raise
        if name == "collect 2":
            wait_until(lambda: "train 1" in stages.begun, timeout_s=20)
            _thread.interrupt_main()

    stages.held_up = held_up  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert interrupted.is_set()


def train_until_interrupted(failed: threading.Event, interrupted: threading.Event) -> None:
    """Presses Ctrl-C once something else has `failed`, and goes on until the interrupt arrives here."""
    try:
        failed.wait(20)
        _thread.interrupt_main()
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted.set()
        raise


def test_ctrl_c_ends_a_trainer_that_goes_on_after_the_other_lane_has_failed(tmp_path: Path) -> None:
    stages = Stages()
    failed, interrupted = threading.Event(), threading.Event()

    def held_up(name: str) -> None:
        if name == "train 1":
            train_until_interrupted(failed, interrupted)
        if name == "collect 2":
            wait_until(lambda: "train 1" in stages.begun, timeout_s=20)
            threading.Timer(0.2, failed.set).start()
            raise RuntimeError("collect 2")

    stages.held_up = held_up  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert interrupted.is_set()


def test_ctrl_c_reaches_every_training_also_where_one_of_them_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, interrupted = threading.Event(), threading.Event()

    def run_stage(run: Any, name: str, iteration: int, *, model_group: str) -> None:
        if model_group == "a":
            threading.Timer(0.2, failed.set).start()
            raise RuntimeError("a")
        train_until_interrupted(failed, interrupted)

    monkeypatch.setattr(steps, "run_stage", run_stage)
    run: Any = SimpleNamespace(config=SimpleNamespace(train_tasks=["a", "b"]))
    with pytest.raises(KeyboardInterrupt):
        steps.do_step(run, Step(1, "train"))
    assert interrupted.is_set()


def test_ctrl_c_leaves_trainers_that_wait_for_work_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages = Stages()

    def held_up(name: str) -> None:
        if name == "sync 1":
            wait_until(lambda: "train 2" in stages.trainers, timeout_s=20)
            time.sleep(0.1)
            _thread.interrupt_main()

    stages.held_up = held_up  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        walk(opened(tmp_path), [1, 2, 3, 4], stages.do, promoted=stages.promoted.append)
    assert caplog.text == "", "the pool prints what interrupts its waiting thread"


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_seconds_of_a_process_that_is_interrupted_count(
    max_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path, **{"loop.max_lag": max_lag})
    run.begin()

    def stage(own: Run, step: Step, screen: Any) -> None:
        time.sleep(0.02)
        if (step.stage, step.iteration) == ("sync", 2):
            raise KeyboardInterrupt
        finish(own, step.iteration, RECORDS[step.stage](), GROUP if step.stage == "train" else "")

    def seconds(name: str) -> float:
        return float((run.journal.value(run.run_id, name) or {"seconds": 0.0})["seconds"])

    monkeypatch.setattr(local_runner, "_do_step", stage)
    began, through = time.perf_counter(), list[int]()
    with pytest.raises(KeyboardInterrupt), local_runner._Wall(run):
        local_runner._iterate(run, [1, 2, 3, 4], SimpleNamespace(), through.append)  # type: ignore[arg-type]
    took = time.perf_counter() - began
    assert through == [1]
    assert 0.02 <= seconds(RunValue.WALL.of(2)) <= took and seconds(RunValue.WALL.of(3)) == 0
    assert 0.9 * took <= seconds(RunValue.WALL) <= took
