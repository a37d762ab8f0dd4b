"""An idle engine whose steps are long waits for the requests of a wave; it never waits while something runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.fast

STEP_S = 0.06


class Clock:
    """Stands for the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from serve_apps.engines.vllm import cpu  # imports vLLM

    clock = Clock()
    monkeypatch.setattr(cpu, "time", clock)
    return clock


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler whose steps, where they are not empty, start all waiting requests."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    from serve_apps.engines.vllm.cpu import GatheringScheduler

    def init(self: Any) -> None:
        self.running, self.waiting = [], []
        self.max_num_running_reqs, self._pause_state = 64, PauseState.UNPAUSED

    def schedule(self: Any, throttle_prefills: bool) -> int:
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        self.running, self.waiting = self.running + self.waiting, []
        return len(self.running)

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: self.waiting.append(request))
    return GatheringScheduler()


def run_a_request(scheduler: Any, clock: Clock, *, seconds: float) -> None:
    """Plays one request, a step for its prompt and one that takes so long; the engine is idle afterwards."""
    scheduler.add_request(SimpleNamespace())
    for step_s in (2.0, seconds, 1.0):
        assert scheduler.schedule() == 1
        clock.now += step_s
    scheduler.running = []


def test_requests_that_arrive_in_short_succession_begin_together(scheduler: Any, clock: Clock) -> None:
    run_a_request(scheduler, clock, seconds=STEP_S)
    for _ in range(10):
        scheduler.add_request(SimpleNamespace())
        assert scheduler.schedule() == 0
        clock.now += 0.05 * STEP_S
    clock.now += 0.06 * STEP_S
    assert scheduler.schedule() == 10


def test_a_request_waits_no_longer_than_half_a_step(scheduler: Any, clock: Clock) -> None:
    run_a_request(scheduler, clock, seconds=STEP_S)
    sizes = []
    for _ in range(14):
        scheduler.add_request(SimpleNamespace())
        sizes.append(scheduler.schedule())
        clock.now += 0.04 * STEP_S
    assert sizes == [0] * 13 + [14]


def test_nothing_waits_while_a_request_runs(scheduler: Any, clock: Clock) -> None:
    run_a_request(scheduler, clock, seconds=STEP_S)
    scheduler.running = [SimpleNamespace()]
    scheduler.add_request(SimpleNamespace())
    assert scheduler.schedule() == 2


def test_engine_with_short_steps_does_not_gather(scheduler: Any, clock: Clock) -> None:
    scheduler.add_request(SimpleNamespace())
    assert scheduler.schedule() == 1, "no step was measured yet"
    scheduler.running = []
    run_a_request(scheduler, clock, seconds=0.003)
    scheduler.add_request(SimpleNamespace())
    assert scheduler.schedule() == 1


def test_engine_that_is_paused_stays_paused(scheduler: Any, clock: Clock) -> None:
    from vllm.v1.core.sched.interface import PauseState

    run_a_request(scheduler, clock, seconds=STEP_S)
    scheduler.add_request(SimpleNamespace())
    scheduler._pause_state = PauseState.PAUSED_ALL
    assert scheduler.schedule() == 0
    assert scheduler._pause_state == PauseState.PAUSED_ALL


def test_engine_that_is_full_does_not_wait(scheduler: Any, clock: Clock) -> None:
    run_a_request(scheduler, clock, seconds=STEP_S)
    for _ in range(64):
        scheduler.add_request(SimpleNamespace())
    assert scheduler.schedule() == 64
