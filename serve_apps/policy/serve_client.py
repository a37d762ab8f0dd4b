r"""serve_client: one GenerateRequest -> Completion, from the Serve app of its model group; concurrent calls share Serve calls.

```
put() --\                        /--> results, some at a time; in between, how far the others are
put() ---+--> queue of an app --+
put() --/     (oldest episode    \--> a failed call: what is unfinished goes back into the queue,
                    first)                  with the same seed, after a pause
```

No more calls are under way than the app's engines can sample at once; the others wait here, where waiting costs nothing and
can be given up. A call is repeated only where the replica or its engine fails, or nothing comes for `call_timeout_s`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_apps.config import CallConfig
from serve_apps.engines.port import CONTEXT, REFUSED, Piece, Progress
from serve_apps.episode_clock import EpisodeClock, current_clock
from serve_apps.policy.client import (
    CallCounts,
    ContextExhausted,
    PolicyCallError,
    RequestRefused,
    completion_of,
    is_cancelled,
)
from stores.inside_ray import taken
from stores.types import Completion, FinishReason, GenerateRequest

ANSWERS = {FinishReason.STOP.value, FinishReason.LENGTH.value, CONTEXT, REFUSED}
"""Finish reasons of a request that is finished; with any other the engine gave it up, and it is repeated."""
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it grows fourfold, for a replica that is being replaced."""
LONGEST_PAUSE_S = 30.0
"""No pause is longer: the clocks of episodes stand still in it, and ten attempts would take twelve hours."""

NO_REPLICA_S = 5.0
"""How long a caller of the gateway waits for a replica that takes a call. Only where all replicas of an app are gone does that take
longer than some milliseconds, and until one is there again about a minute."""


class NoReplica(ConnectionError):
    """Raised where no replica of an app took a call in time; the call is not repeated."""


async def until_taken(stream: Any, app: str, *, timeout_s: float) -> None:
    """Returns once a replica has taken the call of this stream; NoReplica where none has in time, and what Serve raises."""
    try:
        async with asyncio.timeout(timeout_s):
            await taken(stream)
    except TimeoutError:
        raise NoReplica(f"no replica of app {app!r} took the call within {timeout_s:g} s") from None


class ServeClient:
    """Implements PolicyClient over Ray Serve. It belongs to one event loop: make it where it is used."""

    def __init__(
        self,
        app_names: Mapping[str, str],
        call: CallConfig,
        *,
        capacity: Mapping[str, int] | None = None,
        open_app: Callable[[str], Any] | None = None,
        replica_timeout_s: float | None = None,
    ) -> None:
        """Makes the client; nothing is contacted yet.

        Args:
            app_names: Serve application of every model group.
            call: deadlines, attempts, coalescing.
            capacity: by application, the number of calls that may be under way at once; None: any number.
            open_app: application name -> streaming handle of `Policy.generate`; default asks Serve.
            replica_timeout_s: how long a call waits for a replica where an app has none; it is not repeated then. None: for the
                call's timeout.
        """
        queues = {
            app: _CallQueue(
                app,
                call,
                None if capacity is None else capacity[app],
                open_app or open_serve_app,
                replica_timeout_s=replica_timeout_s,
            )
            for app in set(app_names.values())
        }
        self._queues = {group: queues[app] for group, app in app_names.items()}
        self._numbers = itertools.count()

    @property
    def counts(self) -> CallCounts:
        """Returns what became of the calls until now, over all apps."""
        return sum((queue.counts for queue in set(self._queues.values())), CallCounts())

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion from the app of the request's model group, after at most `max_attempts` attempts.

        While it waits for an engine, here or there, the clock of the episode that asks stands still. How it is with a call that
        was sent is known at the next report of the replica, within `generation.PULSE_S`; until then the clock goes on.

        Raises:
            PolicyCallError: infrastructure failed at every attempt.
            ContextExhausted: prompt + max_tokens exceed the app's `max_model_len`.
            RequestRefused: the engine cannot run this request at all.
        """
        queue = self._queues.get(request.model_group)
        if queue is None:
            raise RequestRefused(f"no app for model group {request.model_group!r}; there are {sorted(self._queues)}")
        clock = current_clock()
        order = (time.perf_counter() if clock is None else clock.began, next(self._numbers))
        call = _Call(request=request, answer=asyncio.get_running_loop().create_future(), clock=clock, order=order)
        queue.put(call)
        try:
            return await call.answer
        finally:
            call.begins()


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """Holds a request that has no completion yet."""

    request: GenerateRequest
    answer: asyncio.Future[Completion]
    clock: EpisodeClock | None
    order: tuple[float, int]
    """When its episode began, then when it was made: who goes first."""
    num_attempts: int = 0
    num_tokens: int = 0
    """Sampled so far in this attempt."""
    sent_at: float = float("inf")
    """When it was first sent, by `time.monotonic()`."""

    def waits(self) -> None:
        """Tells the episode's clock that the call waits for an engine."""
        if self.clock is not None:
            self.clock.starts_waiting(self)

    def begins(self) -> None:
        """Tells the episode's clock that the call does not wait any more."""
        if self.clock is not None:
            self.clock.has_begun(self)

    def hears(self, num_tokens: int) -> None:
        """Notes how far the engine is; at 0 tokens it has not begun."""
        self.num_tokens = num_tokens
        if num_tokens:
            self.begins()
        elif not self.answer.done():
            self.waits()


class _CallQueue:
    """Coalesces the requests of one app into streaming Serve calls, as many at once as the app takes."""

    def __init__(
        self,
        app: str,
        config: CallConfig,
        capacity: int | None,
        open_app: Callable[[str], Any],
        *,
        replica_timeout_s: float | None = None,
    ) -> None:
        self._app, self._replica_timeout_s = app, replica_timeout_s
        self._open_app = open_app
        self._config = config
        self._capacity = capacity
        self._waiting: list[tuple[tuple[float, int], _Call]] = []
        self._under_way: set[_Call] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._stream_handle: Any = None
        self._heard_at = float("-inf")
        """When the last message came from the app, by `time.monotonic()`."""
        self._ended = CallCounts()

    @property
    def counts(self) -> CallCounts:
        """Returns what became of this app's calls until now."""
        return self._ended + CallCounts(num_tokens=sum(call.num_tokens for call in self._under_way))

    def put(self, call: _Call) -> None:
        """Sends `call` with the next batch that has room for it, unless its caller has given up."""
        if call.answer.done():
            return
        call.waits()
        heapq.heappush(self._waiting, (call.order, call))
        self._wake()

    @property
    def _room(self) -> int:
        """The number of calls that the next batch may hold."""
        batch_max = self._config.batch_max
        return batch_max if self._capacity is None else min(batch_max, self._capacity - len(self._under_way))

    def _wake(self) -> None:
        room = self._room
        if min(room, len(self._waiting)) >= self._config.batch_max:
            self._send()
        elif room > 0 and self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._config.batch_wait_s, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while batch := self._next_batch():
            self._under_way.update(batch)
            task = asyncio.ensure_future(self._run(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    def _next_batch(self) -> list[_Call]:
        batch: list[_Call] = []
        room = self._room
        while self._waiting and len(batch) < room:
            _, call = heapq.heappop(self._waiting)
            if not call.answer.done():  # a caller may have given up meanwhile
                batch.append(call)
        return batch

    async def _run(self, batch: list[_Call]) -> None:
        """Makes one Serve call; afterwards every call of `batch` is answered or back in the queue."""
        for call in batch:
            call.num_attempts += 1
            call.sent_at = min(call.sent_at, time.monotonic())
            call.begins()  # as far as anybody knows: an engine that is busy with others says so
        unfinished = dict(enumerate(batch))
        fault: Exception = ConnectionError("the replica ended the stream early")
        try:
            async with asyncio.timeout(self._config.call_timeout_s) as silence:
                await self._stream(unfinished, silence)
        except TimeoutError:
            limit = f"call_timeout_s = {self._config.call_timeout_s:g} s"
            fault = TimeoutError(f"nothing came from the engine for {limit}")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            fault = ConnectionError("Serve cancelled the call")
        except Exception as error:  # noqa: BLE001 - whatever it is: nobody else can answer these calls, or free their places
            fault = error
        await self._repeat(list(unfinished.values()), fault)

    async def _stream(self, unfinished: dict[int, _Call], silence: asyncio.Timeout) -> None:
        """Sends the unfinished calls and removes those whose results come back; every message prolongs `silence`.

        Raises ConnectionError, after all have come back, if the engine gave up some of them.
        """
        given_up = ""
        if self._stream_handle is None:
            self._stream_handle = self._open_app(self._app)
        stream = self._stream_handle.remote([call.request for call in unfinished.values()])
        try:
            if self._replica_timeout_s is not None:
                await until_taken(stream, self._app, timeout_s=self._replica_timeout_s)
            async for message in stream:
                self._heard_at = time.monotonic()
                silence.reschedule(asyncio.get_running_loop().time() + self._config.call_timeout_s)
                if isinstance(message, Progress):
                    for place, call in unfinished.items():
                        call.hears(message.num_tokens.get(place, 0))
                    if all(call.answer.done() for call in unfinished.values()):  # their callers have given up
                        stream.cancel()
                        self._drop(unfinished)
                        return
                    continue
                for place, piece in message:
                    if piece.finish_reason in ANSWERS:
                        self._answer(unfinished.pop(place), piece)
                    else:
                        why = f": {piece.error}" if piece.error else ""
                        given_up = f"the engine ended a request with finish reason {piece.finish_reason!r}{why}"
                self._wake()
        except (asyncio.CancelledError, NoReplica):
            stream.cancel()
            raise
        if given_up:
            raise ConnectionError(given_up)

    def _answer(self, call: _Call, piece: Piece) -> None:
        call.num_tokens = len(piece.token_ids)
        self._ends(call)
        self._ended += CallCounts(num_calls=1)
        _set_answer(call, piece)

    def _drop(self, unfinished: dict[int, _Call]) -> None:
        for call in unfinished.values():
            self._ends(call)
        unfinished.clear()

    def _ends(self, call: _Call) -> None:
        """Frees the place of a call whose attempt is over."""
        self._under_way.discard(call)
        self._ended += CallCounts(num_tokens=call.num_tokens)
        call.num_tokens = 0

    async def _repeat(self, calls: list[_Call], fault: Exception) -> None:
        """Puts `calls` back after a pause; those at their last attempt fail.

        They keep their places until then, so that an app that answers nobody is asked by few. Where nothing at all came from
        it in all the attempts of a call, the calls that wait fail, too: each of them would only find the same.
        """
        again = []
        for call in calls:
            is_last = call.num_attempts >= self._config.max_attempts or isinstance(fault, NoReplica)
            if not is_last and not call.answer.done():
                again.append(call)
                continue
            self._ends(call)
            if not call.answer.done():
                call.answer.set_exception(_last_fault(self._app, call, fault))
                if self._heard_at < call.sent_at:
                    self._fail_waiting(fault)
        self._wake()
        if not again:
            return
        is_late = isinstance(fault, TimeoutError)
        self._ended += CallCounts(num_late=len(again)) if is_late else CallCounts(num_lost=len(again))
        for call in again:
            call.waits()
        await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (again[0].num_attempts - 1)))
        for call in again:
            self._ends(call)  # its place was kept during the pause, so that a failing app is asked by few
            self.put(call)
        self._wake()  # `put` does so only for a call whose caller still waits; the places of the others are free, too

    def _fail_waiting(self, fault: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for _, call in waiting:
            if not call.answer.done():
                call.answer.set_exception(_last_fault(self._app, call, fault))


def open_serve_app(app: str) -> Any:
    """Returns a streaming handle of the app's `Policy.generate`; raises RayServeException if there is no such app."""
    from ray import serve

    return serve.get_app_handle(app).options(stream=True, method_name="generate")


def _set_answer(call: _Call, piece: Piece) -> None:
    if call.answer.done():  # its caller has given up
        return
    try:
        call.answer.set_result(completion_of(piece, call.request, num_attempts=call.num_attempts))
    except (ContextExhausted, RequestRefused) as error:
        call.answer.set_exception(error)


def _last_fault(app: str, call: _Call, fault: Exception) -> PolicyCallError:
    what = f"failed {call.num_attempts} times, last with" if call.num_attempts else "waited while all others ended with"
    error = PolicyCallError(f"app {app!r}, request {call.request.request_id!r} {what} {type(fault).__name__}: {fault}")
    error.__cause__ = fault
    return error
