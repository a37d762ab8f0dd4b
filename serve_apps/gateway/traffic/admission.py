"""admission: how many requests are taken on at once. Requests beyond that are refused at once rather than left to time out.

request ──> rate of its key ──> a slot (max_in_flight, key_share) or a short queue (max_queued, queue_timeout_s) ──> work
               429                 429 where the queue is full, 503 where no slot was free in time
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from serve_apps.gateway.traffic.callers import ApiKey, Holder
from serve_apps.gateway.traffic.teams import ServedTeam
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
        left = self._left(key, rate)
        values = str(rate), str(int(left)), f"{(rate - left) * 60 / rate:.3f}s"
        return dict(zip(RATE_HEADERS, values, strict=True))

    def count_request(self, key: ApiKey) -> None:
        """Counts one more request of this key; ApiError 429 where it has made too many in the last minute.

        This is a token bucket that holds one minute's requests and fills evenly.
        """
        rate = key.requests_per_minute
        if rate is None:
            return
        left = self._left(key, rate)
        self._buckets[key.holder] = (left if left < 1 else left - 1), time.monotonic()
        if left < 1:
            raise ApiError(
                429,
                f"API key {key.name!r} may make {rate} requests per minute",
                code="rate_limit_exceeded",
                retry_after_s=(1 - left) * 60 / rate,
            )

    def _left(self, key: ApiKey, rate: int) -> float:
        """Returns how many requests a key may make now."""
        now = time.monotonic()
        left, counted_at = self._buckets.get(key.holder, (float(rate), now))
        return min(rate, left + (now - counted_at) * rate / 60)

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
        except BaseException as error:
            self._stop_waiting(waiting)
            if not isinstance(error, TimeoutError):
                raise
            late = f"no slot became free within {self._timeout_s:g} s: try again later"
            raise ApiError(503, late, code="overloaded", retry_after_s=2) from None

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


class InFlight:
    """Counts the requests that each set of policy apps is answering. It lives in one event loop.

    A set on which nothing is in flight may be loaded with another team.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        """By team, set and version."""

    def add(self, team: ServedTeam, num: int) -> None:
        """Adds `num` requests on this team; -1 where one has ended."""
        self._counts[team.name, team.set_name, team.version] += num

    def rows(self) -> list[dict[str, Any]]:
        """Returns the requests in flight as {"team", "set_name", "team_version", "num"}."""
        return [
            {"team": name, "set_name": set_name, "team_version": version, "num": num}
            for (name, set_name, version), num in self._counts.items()
            if num
        ]


class Slot:
    """A place among the requests in flight, and the team that answers the request that has it, until `release`."""

    def __init__(self, team: ServedTeam, *, key: Holder, admission: Admission, in_flight: InFlight) -> None:
        """The place in `admission` is already taken. Args: key: the holder of the API key that took it."""
        self.team, self._key = team, key
        self.is_counted = False
        """Whether the figures of the team have its answer."""
        self._admission, self._in_flight = admission, in_flight
        self._began = time.perf_counter()
        self._is_released = False
        in_flight.add(team, 1)

    @property
    def seconds(self) -> float:
        """Seconds since the request got the slot."""
        return time.perf_counter() - self._began

    def release(self) -> None:
        """Gives the slot back; further calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self._in_flight.add(self.team, -1)
            self._admission.leave(self._key)

    def __enter__(self) -> ServedTeam:
        return self.team

    def __exit__(self, *_: object) -> None:
        self.release()
