"""gathering_scheduler: requests that reach an idle engine one by one -> one first step for all of them.

    without  r1 │ step: r1 │ step: r1 .. r32 │ ... │ step: r32 │    one step more, in each turn of episodes in lockstep
    with     r1 .. r32 │ step: r1 .. r32 │ ... │

On a CPU a step takes tens of milliseconds, longer than the requests of a wave need to arrive. Imported in engines only.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

LAST_ARRIVAL_SHARE = 0.1
"""An idle engine waits for this share of a step after each request for the next one."""
FIRST_ARRIVAL_SHARE = 0.5
"""It waits no longer than this share of a step after the first one."""
MIN_STEP_S = 0.01
"""Engines with shorter steps never wait: the engine's own loop sleeps for a millisecond."""


class GatheringScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which begins with an empty step while further requests arrive."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_s = 0.0
        """Seconds of the last step that began and ended with requests at work: not of the first one of a wave, with its prompts."""
        self._stepped_at: float | None = None
        """When the last such step began; None where the engine was idle since."""
        self._first_at = self._last_at = 0.0
        """When the first request reached the idle engine, and the last one."""

    def add_request(self, request: Any) -> None:
        """Notes when the request came, and queues it."""
        self._last_at = time.monotonic()
        if not self.running and not self.waiting:
            self._first_at = self._last_at
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Returns the next step, an empty one while the idle engine gathers requests."""
        now = time.monotonic()
        if self.running:
            if self._stepped_at is not None:
                self._step_s = now - self._stepped_at
            self._stepped_at = now
        elif self._gathers(now):
            self._pause_state = PauseState.PAUSED_ALL
            try:
                return super().schedule(throttle_prefills)
            finally:
                self._pause_state = PauseState.UNPAUSED
        return super().schedule(throttle_prefills)

    def _gathers(self, now: float) -> bool:
        self._stepped_at = None
        if self._step_s < MIN_STEP_S or self._pause_state != PauseState.UNPAUSED:
            return False
        return (
            0 < len(self.waiting) < self.max_num_running_reqs
            and now - self._last_at < LAST_ARRIVAL_SHARE * self._step_s
            and now - self._first_at < FIRST_ARRIVAL_SHARE * self._step_s
        )
