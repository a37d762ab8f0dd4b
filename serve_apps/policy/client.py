r"""client: one GenerateRequest -> Completion; concurrent requests share Serve calls, failures are repeated.

```
generate() --\                       /--> results, some at a time
generate() ---+--> lane of an app ---+      a failed call: what is unfinished goes back into the lane,
generate() --/     (batch_wait_s)    \--> one streaming Serve call       with the same seed, after a pause
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from serve_apps.config import CallConfig
from serve_apps.policy.wire import CONTEXT, REFUSED, WireRequest, WireResult, wire_request
from stores.types import Completion, FinishReason, GenerateRequest

ANSWERS = {FinishReason.STOP.value, FinishReason.LENGTH.value, CONTEXT, REFUSED}
"""Finish reasons of a request that is finished; with any other the engine gave it up, and it is repeated."""
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it grows fourfold, for a replica that is being replaced."""


class PolicyCallError(Exception):
    """Raised where a model call failed for infrastructure reasons at its last attempt: the episode becomes infra_error."""


class ContextExhausted(Exception):
    """Raised where the prompt leaves too little room in the context. Repeating the call cannot help."""


class RequestRefused(ValueError):
    """Raised where the engine refuses the request itself (a token id beyond the vocabulary, a bad setting): a bug of
    the caller."""


class PolicyClient(Protocol):
    """Defines what an agent needs of a policy."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion; raises PolicyCallError, ContextExhausted or RequestRefused."""
        ...


@dataclass(slots=True)
class _Call:
    """Holds a request that has no completion yet."""

    request: GenerateRequest
    answer: asyncio.Future[Completion]
    num_attempts: int = 0


class ServeClient:
    """Implements PolicyClient over Ray Serve. It belongs to one event loop: make it where it is used."""

    def __init__(
        self, app_names: Mapping[str, str], call: CallConfig, *, open_app: Callable[[str], Any] | None = None
    ) -> None:
        """Makes the client; nothing is contacted yet.

        Args:
            app_names: Serve application of every model group.
            call: deadlines, attempts, coalescing.
            open_app: application name -> streaming handle of `Policy.generate_batch`; default asks Serve.
        """
        lanes = {app: _Lane(app, call, open_app or open_serve_app) for app in set(app_names.values())}
        self._lanes = {group: lanes[app] for group, app in app_names.items()}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion from the app of the request's model group, after at most `max_attempts` attempts.

        Raises:
            PolicyCallError: infrastructure failed at every attempt.
            ContextExhausted: prompt + max_tokens exceed the app's `max_model_len`.
            RequestRefused: the engine cannot run this request at all.
        """
        lane = self._lanes.get(request.model_group)
        if lane is None:
            raise RequestRefused(f"no app for model group {request.model_group!r}; there are {sorted(self._lanes)}")
        call = _Call(request, asyncio.get_running_loop().create_future())
        lane.put(call)
        return await call.answer


class _Lane:
    """Coalesces the requests of one app into streaming Serve calls."""

    def __init__(self, app: str, config: CallConfig, open_app: Callable[[str], Any]) -> None:
        self._app = app
        self._open_app = open_app
        self._config = config
        self._waiting: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._stream_handle: Any = None

    def put(self, call: _Call) -> None:
        """Sends `call` with the next batch."""
        self._waiting.append(call)
        if len(self._waiting) >= self._config.batch_max:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._config.batch_wait_s, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        batch = [call for call in batch if not call.answer.done()]  # a caller may have given up meanwhile
        if batch:
            task = asyncio.ensure_future(self._run(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _run(self, batch: list[_Call]) -> None:
        """Makes one Serve call; afterwards every call of `batch` is answered or back in the lane."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        for call in batch:
            call.num_attempts += 1
        unfinished = dict(enumerate(batch))
        fault: Exception = ConnectionError("the replica ended the stream early")
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._stream(unfinished)
        except TimeoutError:
            fault = TimeoutError(f"no answer within call_timeout_s = {self._config.call_timeout_s:g} s")
        except (RayError, RayServeException, ConnectionError) as error:
            fault = error
        if unfinished:
            await self._repeat(list(unfinished.values()), fault)

    async def _stream(self, unfinished: dict[int, _Call]) -> None:
        """Sends the unfinished calls and removes those whose results come back.

        Raises ConnectionError, after all have come back, if the engine gave up some of them.
        """
        given_up = ""
        if self._stream_handle is None:
            self._stream_handle = self._open_app(self._app)
        stream = self._stream_handle.remote([_wire(key, call.request) for key, call in unfinished.items()])
        try:
            async for results in stream:
                for result in results:
                    if result.finish_reason in ANSWERS:
                        _answer(unfinished.pop(result.key), result)
                    else:
                        given_up = f"the engine ended a request with finish reason {result.finish_reason!r}"
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if given_up:
            raise ConnectionError(given_up)

    async def _repeat(self, calls: list[_Call], fault: Exception) -> None:
        """Puts `calls` back after a pause; those at their last attempt fail."""
        again = []
        for call in calls:
            if call.answer.done():
                continue
            if call.num_attempts >= self._config.max_attempts:
                call.answer.set_exception(_last_fault(self._app, call, fault))
            else:
                again.append(call)
        if not again:
            return
        await asyncio.sleep(FIRST_PAUSE_S * 4 ** (again[0].num_attempts - 1))
        for call in again:
            self.put(call)


def open_serve_app(app: str) -> Any:
    """Returns a streaming handle of the app's `generate_batch`; raises RayServeException if there is no such app."""
    from ray import serve

    return serve.get_app_handle(app).options(stream=True, method_name="generate_batch")


def _wire(key: int, request: GenerateRequest) -> WireRequest:
    return wire_request(
        key, request.prompt_token_ids, request.sampling, model_group=request.model_group, seed=request.seed
    )


def _answer(call: _Call, result: WireResult) -> None:
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
            )
        )


def _last_fault(app: str, call: _Call, fault: Exception) -> PolicyCallError:
    error = PolicyCallError(
        f"app {app!r}, request {call.request.request_id!r} failed {call.num_attempts} times, "
        f"last with {type(fault).__name__}: {fault}"
    )
    error.__cause__ = fault
    return error
