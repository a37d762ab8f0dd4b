"""episodes: what the recorder of an episode does -> a span of the workflow, and below it those of agents, model calls and tools.

    invoke_workflow TEAM ──┬── invoke_agent AGENT ── chat MODEL_GROUP
                           ├── execute_tool TOOL
                           └── chat MODEL_GROUP          (a call of a program)

A call of a program that runs elsewhere belongs to the trace of its own request, with a link to the episode's span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.trace import Tracer

from serve_apps.episode_spec import EpisodeSpec
from serve_apps.extensions.telemetry import names
from serve_apps.extensions.telemetry.spans import Attributes, Kind, LiveSpan, as_json, messages, open_span
from serve_apps.spans import EpisodeSpans, Served, Span
from stores.types import SOUND, ToolCall, Trace, Turn

FAILED_TOOL = "tool_error"
"""The `error.type` of a tool call that failed and that its workflow goes on from."""


class LiveEpisodeSpans(EpisodeSpans):
    """Makes the spans of one attempt at an episode. As a block it is the span of the whole workflow."""

    def __init__(
        self, tracer: Tracer, spec: EpisodeSpec, *, workflow: str, attempt: int, served: Served | None, texts: bool
    ) -> None:
        """Opens nothing yet. Args: texts: whether spans hold texts; for the others see `Spans.episode`."""
        self._tracer = tracer
        self._episode_id = spec.episode_id if served is None or not served.episode_id else served.episode_id
        self._name = workflow.rpartition(":")[2] if served is None else served.team
        self._has_texts = texts and not (served is not None and served.hides_texts)
        self._begin = {
            names.AGENT_NAME: self._name,
            names.WORKFLOW: workflow,
            names.ATTEMPT: attempt,
            names.RESPONSE_ID: self._episode_id,
        }
        self._of_all: dict[str, Any] = {names.PROVIDER_NAME: names.PROVIDER, names.EPISODE_ID: self._episode_id}
        if served is None:
            self._begin[names.TASK_ID] = spec.task.task_id
            self._of_all |= {names.RUN_ID: spec.run_id, names.ITERATION: spec.iteration}
            self._of_all |= {names.PURPOSE: spec.purpose.value}
        else:
            self._of_all |= {names.TEAM: served.team, names.TEAM_VERSION: served.team_version}
            self._of_all |= {names.ALIAS: served.alias}
        self._span: LiveSpan | None = None

    def __enter__(self) -> Self:
        self._span = self._open(names.INVOKE_WORKFLOW, self._name, self._begin, describe=self._of_episode)
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._span is not None, "the block was entered"
        self._span.__exit__(kind, error, where)

    def record(self, trace: Trace) -> None:
        """Takes the record of the attempt."""
        assert self._span is not None, "the block was entered"
        self._span.record(trace)

    def hide_texts(self) -> None:
        """Leaves texts out of all that ends from now on, since a caller said that nothing may be stored."""
        self._has_texts = False

    def agent(self, name: str) -> Span:
        """Returns the span of an agent that the workflow calls."""
        return self._open(names.INVOKE_AGENT, name, {names.AGENT_NAME: name})

    def turn(self, agent: str, model_group: str) -> Span:
        """Returns the span of a model call; its result is the turn."""
        attributes = {names.REQUEST_MODEL: model_group, names.AGENT_NAME: agent, names.MODEL_GROUP: model_group}
        return self._open(names.CHAT, model_group, attributes, kind="client", describe=self._of_turn)

    def tool(self, name: str) -> Span:
        """Returns the span of a tool that the workflow calls; its result is the call as it is recorded."""
        return self._open(names.EXECUTE_TOOL, name, {names.TOOL_NAME: name}, describe=self._of_tool_call)

    def used(self, call: ToolCall) -> None:
        """Takes a tool call that a program made by itself and that has just ended."""
        assert self._span is not None, "the block was entered"
        began_ns = time.time_ns() - int(call.duration_s * 1e9)
        place: dict[str, Any] = {
            "parent": trace.set_span_in_context(self._span.span),
            "links": (),
            "start_time_ns": began_ns,
        }
        own = {names.TOOL_NAME: call.tool, names.AGENT_NAME: call.caller}
        with self._open(names.EXECUTE_TOOL, call.tool, own, describe=self._of_tool_call, **place) as span:
            span.record(call)

    def _open(
        self, operation: str, name: str, attributes: Attributes, *, kind: Kind = "internal", **settings: Any
    ) -> LiveSpan:
        every = {names.OPERATION_NAME: operation, **self._of_all, **attributes}
        settings = {**self._place(), **settings, "kind": kind, "with_messages": lambda: self._has_texts}
        return open_span(self._tracer, f"{operation} {name}", every, **settings)

    def _place(self) -> Mapping[str, Any]:
        """Returns where a span belongs that begins now: below the current span, or else below that of the episode."""
        if self._span is None:
            return {}
        own, current = self._span.span.get_span_context(), trace.get_current_span().get_span_context()
        if not current.is_valid:
            return {"parent": trace.set_span_in_context(self._span.span)}
        return {} if current.trace_id == own.trace_id else {"links": (trace.Link(own),)}

    def _of_episode(self, trace: Trace) -> Attributes:
        said: dict[str, Any] = {names.STATUS: trace.status.value, names.STOP_REASON: trace.stop_reason}
        if trace.status not in SOUND:
            said[names.ERROR_TYPE] = trace.status.value
        if self._has_texts:
            said[names.INPUT_MESSAGES] = messages("user", [trace.task.prompt])
            said[names.OUTPUT_MESSAGES] = messages("assistant", [trace.answer])
        return said

    def _of_turn(self, turn: Turn) -> Attributes:
        said = {names.RESPONSE_ID: f"chatcmpl-{self._episode_id}-{turn.turn_index}", **turn_attributes(turn)}
        if self._has_texts:
            said[names.INPUT_MESSAGES] = messages("user", [turn.prompt_text])
            said[names.OUTPUT_MESSAGES] = messages("assistant", [turn.completion_text], [turn.finish_reason.value])
        return said

    def _of_tool_call(self, call: ToolCall) -> Attributes:
        said: dict[str, Any] = {names.TURN_INDEX: call.call_index, names.NUM_ATTEMPTS: call.num_attempts}
        if call.error:
            said[names.ERROR_TYPE] = FAILED_TOOL
        if self._has_texts:
            said[names.TOOL_CALL_ARGUMENTS] = as_json(dict(call.request))
            said[names.TOOL_CALL_RESULT] = as_json(call.error or call.response)
        return said


def turn_attributes(turn: Turn) -> dict[str, Any]:
    """Returns what a span says of a turn, without its texts."""
    said: dict[str, Any] = {
        names.REQUEST_MAX_TOKENS: turn.sampling.max_tokens,
        names.REQUEST_TEMPERATURE: turn.sampling.temperature,
        names.REQUEST_TOP_P: turn.sampling.top_p,
        names.REQUEST_SEED: turn.seed,
        names.RESPONSE_MODEL: f"{turn.model_group}@{turn.policy_version}",
        names.RESPONSE_FINISH_REASONS: [turn.finish_reason.value],
        names.USAGE_INPUT_TOKENS: len(turn.prompt_token_ids),
        names.USAGE_OUTPUT_TOKENS: len(turn.completion_token_ids),
        names.POLICY_VERSION: turn.policy_version,
        names.TURN_INDEX: turn.turn_index,
        names.ROUND_INDEX: turn.round_index,
        names.NUM_ATTEMPTS: turn.num_attempts,
        names.IS_FORMAT_OK: turn.is_format_ok,
    }
    if turn.num_cached_tokens is not None:
        said[names.USAGE_CACHE_READ_INPUT_TOKENS] = turn.num_cached_tokens
    return said
