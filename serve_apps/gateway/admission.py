"""admission: how much is taken on at once. What is beyond is told to come again, rather than wait until it gives up.

request ──> rate of its key ──> a place (max_in_flight) or a short queue (max_queued, queue_timeout_s) ──> work
               429                 429 where the queue is full, 503 where the wait was in vain
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from serve_apps.gateway.api_keys import ApiKey
from serve_apps.openai_api.protocol import ApiError


class Admission:
    """Places for requests. Lives in one event loop."""

    def __init__(self, *, max_in_flight: int, max_queued: int, queue_timeout_s: float) -> None:
        self._max_in_flight, self._max_queued, self._timeout_s = max_in_flight, max_queued, queue_timeout_s
        self.num_in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._buckets: dict[str, tuple[float, float]] = {}
        """By key name: requests left, and when that was so."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def count(self, key: ApiKey) -> None:
        """One more request of this key; 429 where it has made too many in the last minute."""
        rate = key.requests_per_minute
        if rate is None:
            return
        now = time.monotonic()
        left, at = self._buckets.get(key.name, (float(rate), now))
        left = min(rate, left + (now - at) * rate / 60)
        if left < 1:
            self._buckets[key.name] = left, now
            raise ApiError(
                429,
                f"API key {key.name!r} may make {rate} requests per minute",
                code="rate_limit_exceeded",
                retry_after_s=(1 - left) * 60 / rate,
            )
        self._buckets[key.name] = left - 1, now

    async def enter(self) -> None:
        """Takes a place; each is given back with one `leave`."""
        if self.num_in_flight < self._max_in_flight:
            self.num_in_flight += 1
            return
        if len(self._waiting) >= self._max_queued:
            raise ApiError(
                429,
                f"{self.num_in_flight} requests are being answered and {len(self._waiting)} wait: come again",
                code="overloaded",
                retry_after_s=1,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise ApiError(
                503, f"no place within {self._timeout_s:g} s: come again", code="overloaded", retry_after_s=2
            ) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def leave(self) -> None:
        """Gives a place back, to the first that waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the place goes on to it
                return
        self.num_in_flight -= 1

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # it was given a place in the same moment
            self.leave()
        elif turn in self._waiting:
            self._waiting.remove(turn)
