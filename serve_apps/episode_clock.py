"""episode_clock: the seconds of an episode, without those in which a model call of it waits for an engine to begin on it.

    Recorder ── deadline(turn_timeout_s) ──> a deadline by this clock
        └── while a call is asked: is_current ──> ServeClient: starts_waiting ... has_begun

How long a call stands in line is a matter of what else there is to do. A deadline that counted it would end work that is
only late, and have it sampled again behind the same line. The client bounds such a wait itself: an engine from which nothing
comes fails the call (`CallConfig.call_timeout_s`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_current: ContextVar[EpisodeClock | None] = ContextVar("episode_clock", default=None)


class EpisodeClock:
    """Counts seconds from when it is made; it stands still while at least one model call of the episode waits."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._waiting: set[object] = set()
        self._stopped_at = 0.0
        self._stopped_s = 0.0
        self._left_s: dict[asyncio.Timeout, float] = {}
        """Of every open deadline, the seconds that are left since the clock last started or stopped."""

    @property
    def seconds(self) -> float:
        """Returns the seconds counted until now."""
        now = self._stopped_at if self._waiting else time.perf_counter()
        return now - self.began - self._stopped_s

    @asynccontextmanager
    async def deadline(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError, as `asyncio.timeout` does, when the block has taken so many seconds by this clock."""
        async with asyncio.timeout(None if self._waiting else seconds) as timeout:
            self._left_s[timeout] = seconds
            try:
                yield
            finally:
                del self._left_s[timeout]

    def starts_waiting(self, call: object) -> None:
        """Stops the clock for a call, until `has_begun`."""
        if not self._waiting:
            self._stopped_at = time.perf_counter()
            loop_time = asyncio.get_running_loop().time()
            for timeout in self._left_s:
                if (when := timeout.when()) is not None and not timeout.expired():
                    self._left_s[timeout] = when - loop_time
                    timeout.reschedule(None)
        self._waiting.add(call)

    def has_begun(self, call: object) -> None:
        """Starts the clock again, unless another call waits; does nothing for a call that does not wait."""
        if call not in self._waiting:
            return
        self._waiting.discard(call)
        if not self._waiting:
            self._stopped_s += time.perf_counter() - self._stopped_at
            loop_time = asyncio.get_running_loop().time()
            for timeout, left_s in self._left_s.items():
                if not timeout.expired():
                    timeout.reschedule(loop_time + left_s)

    @contextmanager
    def is_current(self) -> Iterator[None]:
        """Makes `current_clock` return this clock inside the block, and in tasks that are begun there."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_clock() -> EpisodeClock | None:
    """Returns the clock of the episode whose model call this is; None outside of episodes."""
    return _current.get()
