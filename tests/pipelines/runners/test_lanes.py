"""Two lanes: what each does in which order, that they overlap, and how failures and interrupts end both."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.runners.lanes import result_of_all, walk
from tests.waits import wait_until

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def opened(folder: Path, **changes: object) -> Run:
    return Run(load_config(SMALL, {"storage.root": str(folder), "iterations": 4, "loop.max_lag": 1, **changes}))


class Stages:
    """Notes which stages were done by which lane; `waits` may hold one up or have it fail."""

    def __init__(self) -> None:
        self.engines: list[str] = []
        self.trainers: list[str] = []
        self.promoted: list[int] = []
        self.begun: set[str] = set()

    def do(self, run: Run, stage: str, iteration: int) -> None:
        name = f"{stage} {iteration}"
        self.begun.add(name)
        self.held_up(name)
        is_main = threading.current_thread() is threading.main_thread()
        (self.engines if is_main else self.trainers).append(name)

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
    stages = Stages()
    walk(opened(tmp_path), [3, 4], stages.do, promoted=stages.promoted.append)
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


def test_results_come_in_order_and_the_first_failure_is_raised() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        assert result_of_all([pool.submit(lambda x=x: x) for x in (3, 1, 2)]) == [3, 1, 2]
        with pytest.raises(ZeroDivisionError):
            result_of_all([pool.submit(lambda: 1 // 0), pool.submit(lambda: 1)])
