"""admission: how many requests are taken on at once. Requests beyond that are refused at once rather than left to time out.

request ──> rate of its key ──> a slot (max_in_flight, key_share) or a short queue (max_queued, queue_timeout_s) ──> work
               429                 429 where the queue is full, 503 where no slot was free in time
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass

from serve_apps.gateway.traffic.api_keys import ApiKey, Holder
from serve_apps.openai_api.protocol import ApiError

RATE_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
"""What OpenAI's clients read about the rate of a key."""


class Admission:
    """The slots for requests and the queue for them. It lives in one event loop."""

    def __init__(self, *, max_in_flight: int, max_queued: int, queue_timeout_s: float) -> None:
        self._max_in_flight, self._max_queued, self._timeout_s = max_in_flight, max_queued, queue_timeout_s
        self.num_in_flight = 0
        self._num_of_key: Counter[Holder] = Counter()
        """Slots by the holder of the key that has them."""
        self._waiting: deque[_Waiting] = deque()
        self._buckets: dict[Holder, tuple[float, float]] = {}
        """By holder of a key: requests left, and the time at which that many were left."""

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._waiting)

    def rate_headers(self, key: ApiKey) -> dict[str, str]:
        """Returns how many requests a key may make, in the headers that OpenAI's clients read; empty for a key without a rate."""
        rate = key.requests_per_minute
        if rate is None:
            return {}
        left, counted_at = self._buckets.get(key.holder, (float(rate), time.monotonic()))
        left = min(rate, left + (time.monotonic() - counted_at) * rate / 60)
        values = str(rate), str(int(left)), f"{(rate - left) * 60 / rate:.3f}s"
        return dict(zip(RATE_HEADERS, values, strict=True))

    def count_request(self, key: ApiKey) -> None:
        """Counts one more request of this key; ApiError 429 where it has made too many in the last minute.

        This is a token bucket that holds one minute's requests and fills evenly.
        """
        rate = key.requests_per_minute
        if rate is None:
            return
        now = time.monotonic()
        left, counted_at = self._buckets.get(key.holder, (float(rate), now))
        left = min(rate, left + (now - counted_at) * rate / 60)
        if left < 1:
            self._buckets[key.holder] = left, now
            raise ApiError(
                429,
                f"API key {key.name!r} may make {rate} requests per minute",
                code="rate_limit_exceeded",
                retry_after_s=(1 - left) * 60 / rate,
            )
        self._buckets[key.holder] = left - 1, now

    async def enter(self, key: Holder, *, share: float = 1.0) -> None:
        """Takes a slot, after waiting in the queue if need be. Give each slot back with one `leave`.

        Args:
            key: the holder of the API key that asks (`ApiKey.holder`).
            share: of the slots, and of the queue, that requests of this key may take; at least one of each.
        """
        most = max(1, int(share * self._max_in_flight))
        if self.num_in_flight < self._max_in_flight and self._num_of_key[key] < most:
            self._take(key)
            return
        num_waiting = sum(waiting.key == key for waiting in self._waiting)
        if len(self._waiting) >= self._max_queued or num_waiting >= max(1, int(share * self._max_queued)):
            raise ApiError(
                429,
                f"{self.num_in_flight} requests are being answered and {len(self._waiting)} are waiting, of API key {key.name!r} "
                f"{self._num_of_key[key]} and {num_waiting}: try again later",
                code="overloaded",
                retry_after_s=1,
            )
        waiting = _Waiting(key=key, most=most, turn=asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._timeout_s):
                await waiting.turn
        except TimeoutError:
            self._stop_waiting(waiting)
            raise ApiError(
                503,
                f"no slot became free within {self._timeout_s:g} s: try again later",
                code="overloaded",
                retry_after_s=2,
            ) from None
        except asyncio.CancelledError:
            self._stop_waiting(waiting)
            raise

    def leave(self, key: Holder) -> None:
        """Gives a slot back; the first request in the queue whose key may have one more gets it."""
        self.num_in_flight -= 1
        self._num_of_key[key] -= 1
        for waiting in list(self._waiting):
            if waiting.turn.done():
                self._waiting.remove(waiting)
            elif self._num_of_key[waiting.key] < waiting.most:
                self._waiting.remove(waiting)
                self._take(waiting.key)
                waiting.turn.set_result(None)
                break
        if not self._num_of_key[key]:
            del self._num_of_key[key]

    def _take(self, key: Holder) -> None:
        self.num_in_flight += 1
        self._num_of_key[key] += 1

    def _stop_waiting(self, waiting: _Waiting) -> None:
        # A race: `leave` may have given this request a slot just before its wait was cancelled. Then the slot is passed on.
        if waiting.turn.done() and not waiting.turn.cancelled():
            self.leave(waiting.key)
        elif waiting in self._waiting:
            self._waiting.remove(waiting)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Waiting:
    """A request in the queue."""

    key: Holder
    most: int
    """How many slots its key may have."""
    turn: asyncio.Future[None]
    """Done as soon as it has a slot."""
