r"""call_queue: the calls of one app -> completions; concurrent calls share Serve calls, failures are repeated.

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
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_apps.config import CallConfig
from serve_apps.episode_clock import EpisodeClock
from serve_apps.policy.client import CallCounts, ContextExhausted, PolicyCallError, RequestRefused
from serve_apps.policy.wire import CONTEXT, REFUSED, WireProgress, WireRequest, WireResult, wire_request
from stores.types import Completion, FinishReason, GenerateRequest

ANSWERS = {FinishReason.STOP.value, FinishReason.LENGTH.value, CONTEXT, REFUSED}
"""Finish reasons of a request that is finished; with any other the engine gave it up, and it is repeated."""
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it grows fourfold, for a replica that is being replaced."""


NO_REPLICA_S = 5.0
"""How long a caller of the gateway waits for a replica that takes a call. Only where all replicas of an app are gone does that take
longer than some milliseconds, and until one is there again about a minute."""


class NoReplica(ConnectionError):
    """Raised where no replica of an app took a call in time; the call is not repeated."""


async def until_taken(stream: Any, app: str, *, timeout_s: float) -> None:
    """Returns once a replica has taken the call of this stream; NoReplica where none has in time, and what Serve raises."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream._to_object_ref_gen()  # Serve's own way to wait for no more than this
    except TimeoutError:
        raise NoReplica(f"no replica of app {app!r} took the call within {timeout_s:g} s") from None


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
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


class CallQueue:
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
        self._waiting: list[tuple[tuple[float, int], Call]] = []
        self._under_way: set[Call] = set()
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

    def put(self, call: Call) -> None:
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

    def _next_batch(self) -> list[Call]:
        batch: list[Call] = []
        room = self._room
        while self._waiting and len(batch) < room:
            _, call = heapq.heappop(self._waiting)
            if not call.answer.done():  # a caller may have given up meanwhile
                batch.append(call)
        return batch

    async def _run(self, batch: list[Call]) -> None:
        """Makes one Serve call; afterwards every call of `batch` is answered or back in the queue."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

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
        except (RayError, RayServeException, ConnectionError) as error:
            fault = error
        await self._repeat(list(unfinished.values()), fault)

    async def _stream(self, unfinished: dict[int, Call], silence: asyncio.Timeout) -> None:
        """Sends the unfinished calls and removes those whose results come back; every message prolongs `silence`.

        Raises ConnectionError, after all have come back, if the engine gave up some of them.
        """
        given_up = ""
        if self._stream_handle is None:
            self._stream_handle = self._open_app(self._app)
        stream = self._stream_handle.remote([_wire(key, call.request) for key, call in unfinished.items()])
        try:
            if self._replica_timeout_s is not None:
                await until_taken(stream, self._app, timeout_s=self._replica_timeout_s)
            async for message in stream:
                self._heard_at = time.monotonic()
                silence.reschedule(asyncio.get_running_loop().time() + self._config.call_timeout_s)
                if isinstance(message, WireProgress):
                    for key, call in unfinished.items():
                        call.hears(message.num_tokens.get(key, 0))
                    if all(call.answer.done() for call in unfinished.values()):  # their callers have given up
                        stream.cancel()
                        self._drop(unfinished)
                        return
                    continue
                for result in message:
                    if result.finish_reason in ANSWERS:
                        self._answer(unfinished.pop(result.key), result)
                    else:
                        why = f": {result.error}" if result.error else ""
                        given_up = f"the engine ended a request with finish reason {result.finish_reason!r}{why}"
                self._wake()
        except (asyncio.CancelledError, NoReplica):
            stream.cancel()
            raise
        if given_up:
            raise ConnectionError(given_up)

    def _answer(self, call: Call, result: WireResult) -> None:
        call.num_tokens = len(result.token_ids)
        self._ends(call)
        self._ended += CallCounts(num_calls=1)
        _set_answer(call, result)

    def _drop(self, unfinished: dict[int, Call]) -> None:
        for call in unfinished.values():
            self._ends(call)
        unfinished.clear()

    def _ends(self, call: Call) -> None:
        """Frees the place of a call whose attempt is over."""
        self._under_way.discard(call)
        self._ended += CallCounts(num_tokens=call.num_tokens)
        call.num_tokens = 0

    async def _repeat(self, calls: list[Call], fault: Exception) -> None:
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
        await asyncio.sleep(FIRST_PAUSE_S * 4 ** (again[0].num_attempts - 1))
        for call in again:
            self._ends(call)
            self.put(call)
        self._wake()  # `put` does so only for a call whose caller still waits; the places of the others are free, too

    def _fail_waiting(self, fault: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for _, call in waiting:
            if not call.answer.done():
                call.answer.set_exception(_last_fault(self._app, call, fault))


def _wire(key: int, request: GenerateRequest) -> WireRequest:
    return wire_request(
        key,
        request.prompt_token_ids,
        request.sampling,
        model_group=request.model_group,
        seed=request.seed,
    )


def _set_answer(call: Call, result: WireResult) -> None:
    if call.answer.done():  # its caller has given up
        return
    if result.finish_reason == CONTEXT:
        call.answer.set_exception(ContextExhausted(f"request {call.request.request_id!r}: {result.error}"))
    elif result.finish_reason == REFUSED:
        call.answer.set_exception(RequestRefused(f"request {call.request.request_id!r}: {result.error}"))
    else:
        call.answer.set_result(
            Completion(
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                finish_reason=FinishReason(result.finish_reason),
                policy_version=result.policy_version,
                is_version_mixed=result.is_version_mixed,
                num_attempts=call.num_attempts,
                num_cached_tokens=result.num_cached_tokens,
                allowed_logprobs=result.allowed_logprobs,
            )
        )


def _last_fault(app: str, call: Call, fault: Exception) -> PolicyCallError:
    what = f"failed {call.num_attempts} times, last with" if call.num_attempts else "waited while all others ended with"
    error = PolicyCallError(f"app {app!r}, request {call.request.request_id!r} {what} {type(fault).__name__}: {fault}")
    error.__cause__ = fault
    return error
