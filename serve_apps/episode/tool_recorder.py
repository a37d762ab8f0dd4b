"""tool_recorder: what a workflow asks of tools and worlds -> their responses, each recorded as a tool call of the trace.

In an episode that is played again a tool's response comes from the record. A world is played again and compared with it, because a world
is what was done to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_apps.authoring.agent import (
    AuthorError,
    Tool,
    ToolError,
    ToolFault,
    ToolRaised,
    counted_attempts,
    noted_version,
    origins_of,
    traced,
)
from serve_apps.authoring.environment import Environment
from serve_apps.episode.causes import covered, first_error, words_of
from serve_apps.episode.replay import GIVEN_UP, Playback
from serve_apps.episode_clock import EpisodeClock
from serve_apps.spans import EpisodeSpans, Span
from serve_apps.worlds.seen import recorded
from serve_apps.worlds.world import Live, World
from stores.types import Cause, ToolCall

UNRECORDED = "[unrecorded]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one call is made and recorded."""

    name: str
    request: Mapping[str, Any]
    """As it is recorded."""
    read: Mapping[str, Any]
    """The inputs, which say what the call was read from."""
    live: Callable[[], Awaitable[Any]]
    is_ours_to_wait: bool
    """Whether the seconds of a call that failed are no policy's."""
    timeout_s: float | None = None
    """None: `live` has a limit of its own."""
    keep: Callable[[Any], Any] = lambda response: response
    """What the record keeps of a response."""


class ToolRecorder:
    """Calls the tools of one attempt at an episode, and opens its worlds."""

    def __init__(self, events: EpisodeEvents, playback: Playback | None) -> None:
        """Args: playback: what is played again; None: nothing."""
        self.calls: dict[int, ToolCall] = {}
        self._events, self._playback = events, playback
        self._num_worlds: dict[str, int] = {}
        self._open: set[World] = set()

    async def use(self, name: str, tool: Tool, request: Mapping[str, Any], spans: EpisodeSpans) -> Any:
        """Calls a tool and returns its response, every text of it marked as coming from this call."""
        recorded_request = {key: UNRECORDED if key in tool.unrecorded else value for key, value in request.items()}

        async def live() -> Any:
            is_known, response = False, None
            if self._playback is not None:
                self._playback.check_stateless(name, tool)
                is_known, response = self._playback.response(name, recorded_request)
            return response if is_known else await tool(**request)

        call = Call(
            name=name,
            request=recorded_request,
            read=request,
            live=live,
            is_ours_to_wait=tool.timeout_cause == Cause.INFRASTRUCTURE,
            timeout_s=tool.timeout_s,
        )
        try:
            index, response = await self._record(call, spans)
        except ToolError:
            if tool.fail_open:
                return tool.fallback
            raise
        if isinstance(response, str):
            self._events.wrote(index, response)
        return traced(response, index)

    def open(self, name: str, environment: Environment, settings: Mapping[str, Any], spans: EpisodeSpans) -> World:
        """Returns a world with these settings, which begins with its block."""
        number = self._num_worlds.get(name, 0)
        self._num_worlds[name] = number + 1

        async def record(request: Mapping[str, Any], live: Live) -> tuple[int, Mapping[str, Any]]:
            asked = {"world": number, **request}

            async def compared() -> dict[str, Any]:
                seen = await live()
                if self._playback is not None:
                    self._playback.compare(name, asked, seen)
                return seen

            call = Call(
                name=name,
                request=asked,
                read=request,
                live=compared,
                is_ours_to_wait=environment.timeout_cause == Cause.INFRASTRUCTURE,
                keep=lambda seen: recorded(seen, environment.max_info),
            )
            index, seen = await self._record(call, spans)
            self._events.wrote(index, seen["text"])
            return index, seen

        return World(name, environment, settings, record, self._events.clock, self._open)

    def used(
        self,
        tool: str,
        *,
        caller: str,
        turn: int,
        request: Mapping[str, Any],
        response: str,
        began: float,
        spans: EpisodeSpans,
    ) -> int:
        """Records a tool call that a program made by itself between two turns; returns its number among the events.

        Args: turn: the turn that asked for it. began: `time.perf_counter()` when that turn was answered.
        """
        index = self._events.next()
        self.calls[index] = ToolCall(
            call_index=index,
            tool=tool,
            caller=caller,
            parents=(turn,),
            request=request,
            response=response,
            error="",
            start_s=began - self._events.began,
            duration_s=time.perf_counter() - began,
        )
        spans.used(self.calls[index])
        self._events.wrote(index, response)
        return index

    async def _record(self, call: Call, spans: EpisodeSpans) -> tuple[int, Any]:
        """Makes a call and records it; returns its number among the events and its response.

        Raises ToolError, or what it is a kind of, for a call that failed, and AuthorError as it is.
        """
        self._events.called()
        with spans.tool(call.name) as span:
            return await self._made(call, span)

    async def _made(self, call: Call, span: Span) -> tuple[int, Any]:
        index, events = self._events.next(), self._events
        start, started = time.perf_counter(), events.clock.seconds
        record = ToolCall(
            call_index=index,
            tool=call.name,
            caller="",
            parents=events.parents_of(call.read, index),
            request=_as_it_is_now(call.request),
            response=None,
            error="",
            start_s=start - events.began,
            duration_s=0.0,
        )
        response: Any = None
        fault: ToolError | AuthorError | None = None
        with counted_attempts() as attempts, noted_version() as version:

            def ended(**more: Any) -> ToolCall:
                return replace(
                    record,
                    num_attempts=max(1, attempts[0]),
                    duration_s=time.perf_counter() - start,
                    version=version[0],
                    **more,
                )

            deadline = asyncio.timeout(call.timeout_s)
            try:
                async with deadline:
                    response = await call.live()
            except asyncio.CancelledError:
                if call.is_ours_to_wait:
                    events.waited(started)
                seconds = time.perf_counter() - start
                self.calls[index] = ended(error=f"{GIVEN_UP} after {seconds:.1f} s")
                raise
            except (Exception, SystemExit, BaseExceptionGroup) as raised:  # noqa: BLE001 - a recorded tool_error, as an agent's is
                fault = _fault(first_error(raised), call, is_late=deadline.expired())
            if isinstance(fault, ToolFault):
                events.waited(started)
            recorded_response = None if fault else _as_it_is_now(call.keep(response))
            message = words_of(fault) or type(fault).__name__ if fault else ""
            self.calls[index] = ended(response=recorded_response, error=message)
        span.record(self.calls[index])
        if isinstance(fault, ToolError):
            kind = next(kind for kind in (ToolFault, ToolRaised, ToolError) if isinstance(fault, kind))
            raise kind(f"tool {call.name!r}: {message}")
        if fault is not None:
            raise fault
        return index, response


def _as_it_is_now(value: Any) -> Any:
    """Returns a copy of data, lists and mappings in it included: a workflow or a tool may go on with its own, and the record is of the call."""
    if isinstance(value, Mapping):
        return {key: _as_it_is_now(item) for key, item in value.items()}
    return type(value)(map(_as_it_is_now, value)) if type(value) in (list, tuple) else value


def _fault(raised: BaseException, call: Call, *, is_late: bool) -> ToolError | AuthorError:
    """Returns what a call that raised this fails with. Args: is_late: it had no answer within its `timeout_s`."""
    if isinstance(raised, (ToolError, AuthorError)):
        return raised
    message = f"{type(raised).__name__}: {words_of(raised)}"
    if not isinstance(raised, TimeoutError):
        return ToolRaised(message)
    error = f"no answer after {call.timeout_s:g} s" if is_late else message  # the tool may have a deadline of its own
    return ToolFault(error) if call.is_ours_to_wait else ToolError(error)


MIN_QUOTE = 12
"""A text of an event that stands inside an input counts as read from there if it has at least so many characters."""


class EpisodeEvents:
    """Holds what the calls of one attempt at an episode share: its clock, its events, and the time that it waited."""

    def __init__(self) -> None:
        """The attempt begins now."""
        self.clock = EpisodeClock()
        self.began = self.clock.began
        self.count = 0
        self._texts: dict[int, tuple[str, ...]] = {}
        self._waited: list[tuple[float, float]] = []
        """Spans of time, by the clock, that no policy can prolong (serve_apps/episode/causes.py)."""
        self.unanswered: dict[int, float] = {}
        """Model calls under way, with their start by the clock."""
        self._callers: set[asyncio.Task[Any] | None] = set()
        self._is_over = False

    def called(self) -> None:
        """Notes the task that makes a call. Raises CancelledError where the attempt is over: it is left over from it."""
        if self._is_over:
            raise asyncio.CancelledError("the attempt at the episode is over")
        self._callers.add(asyncio.current_task())

    def end(self) -> None:
        """Cancels tasks that the workflow left behind, a branch beside one that failed for example: they would go on and ask for nobody."""
        self._is_over = True
        for task in self._callers - {asyncio.current_task()}:
            if task is not None:
                task.cancel()

    def next(self) -> int:
        """Returns the number of the next event."""
        self.count += 1
        return self.count - 1

    def wrote(self, index: int, *texts: str) -> None:
        """Notes the texts of an event: a later input that holds one was read from it."""
        self._texts[index] = texts

    def parents_of(self, inputs: Mapping[str, Any], index: int) -> tuple[int, ...]:
        """Returns the events before `index` whose text stands in these inputs, whole or quoted."""
        parents = {*origins_of(inputs)}
        texts = [value for value in inputs.values() if isinstance(value, str)]
        for event, texts_of_event in self._texts.items():
            quotes = [t for t in texts_of_event if len(t) >= MIN_QUOTE]
            if event not in parents and any(quote in text for quote in quotes for text in texts):
                parents.add(event)
        return tuple(sorted(e for e in parents if e < index))

    def waited(self, start: float, end: float | None = None) -> None:
        """Notes that from `start` to `end` (now), by the clock, the episode waited for what no policy can prolong."""
        self._waited.append((start, self.clock.seconds if end is None else end))

    @property
    def waited_s(self) -> float:
        """The seconds of the clock until now in which the episode waited for what no policy can prolong, see `serve_apps.episode.causes`."""
        now = self.clock.seconds
        return covered([*self._waited, *((start, now) for start in self.unanswered.values())])
