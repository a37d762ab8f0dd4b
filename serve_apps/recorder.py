"""recorder: what a workflow asks of agents and tools -> answers, and the turns and tool calls of its trace.

agents.solver(question=...) ──> prompt ids ──> complete ──> contract ──> Reply
              └──> turns, tool calls, parents, seconds, seeds: nothing the author must do
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from serve_apps.acting_team import ActingTeam, AgentCall, Complete
from serve_apps.agent import (
    Agent,
    Reply,
    Tool,
    ToolError,
    ToolFault,
    ToolRaised,
    TracedText,
    counted_attempts,
    noted_version,
    origins_of,
    traced,
)
from serve_apps.causes import CallTimeout, covered
from serve_apps.config import EpisodeConfig
from serve_apps.contracts import Parsed
from serve_apps.episode_clock import EpisodeClock
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.long_texts import worked_on
from serve_apps.policy.client import ContextExhausted, PolicyCallError, RequestRefused
from serve_apps.prompt_budget import fit_prompt
from serve_apps.replay import Playback
from serve_apps.telemetry.episodes import NO_EPISODE_SPANS, EpisodeSpans
from serve_apps.telemetry.spans import Span
from serve_apps.text_stream import TextStream
from serve_apps.tokenizer import ChatTokenizer
from serve_apps.workflow import Outcome
from stores.types import (
    Cause,
    Completion,
    EpisodeStatus,
    FinishReason,
    GenerateRequest,
    Sampling,
    ToolCall,
    Trace,
    Turn,
)

UNRECORDED = "[unrecorded]"
MIN_QUOTE = 12
"""A text of an event that stands inside an input counts as read from there if it has at least so many characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Holds a prompt in tokens, and the texts that it was made of."""

    text: str
    token_ids: Sequence[int]
    inputs: Mapping[str, str]
    """The texts that went into it: events that are quoted in them are the turn's parents."""
    parents: tuple[int, ...] = ()
    """Further parents that are known."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """The number of characters that were cut from each input to make the prompt fit."""


class Recorder:
    """Gives a workflow its agents and tools, and records every call. A workflow reaches it as `agents.recorder`."""

    def __init__(self, spec: EpisodeSpec, team: ActingTeam, complete: Complete, limits: EpisodeConfig) -> None:
        """Records one attempt at one episode, which begins now."""
        self.spec, self.team, self.complete, self.limits = spec, team, complete, limits
        self.turns: dict[int, Turn] = {}
        self.tool_calls: dict[int, ToolCall] = {}
        self._texts: dict[int, tuple[str, ...]] = {}
        self.num_events = 0
        self.rounds: dict[str, int] = {}
        self.playback = None if spec.script is None else Playback(spec.script)
        self.spans: EpisodeSpans = NO_EPISODE_SPANS
        self.clock = EpisodeClock()
        self.began = self.clock.began
        self._waited: list[tuple[float, float]] = []
        """Spans of time, by the clock, that no policy can prolong (serve_apps/causes.py)."""
        self._unanswered: dict[int, float] = {}
        """Model calls under way, with their start by the clock."""

    @property
    def waited_s(self) -> float:
        """The seconds of the clock until now in which the episode waited for what no policy can prolong, see `serve_apps.causes`."""
        now = self.clock.seconds
        return covered([*self._waited, *((start, now) for start in self._unanswered.values())])

    @property
    def agents(self) -> Calls:
        """The `agents` that are passed to a workflow."""
        return Calls(self._ask, self.team.workflow.agents, self)

    @property
    def tools(self) -> Calls:
        """The `tools` that are passed to a workflow."""
        return Calls(self._use, self.team.workflow.tools, self)

    async def _ask(self, name: str, agent: Agent, inputs: Mapping[str, str]) -> Reply:
        with self.spans.agent(name):
            return await self._reply(name, agent, inputs)

    async def _reply(self, name: str, agent: Agent, inputs: Mapping[str, str]) -> Reply:
        group = self.team.group_of[name]
        tokenizer = self.team.tokenizers[group]
        limit = self.team.max_model_len[group]
        room = limit - min(self.team.sampling[name].max_tokens, limit // 2)  # of a small context half is for the prompt
        length, most = sum(map(len, inputs.values())), tokenizer.most_characters(limit)
        if most is not None and length > most and not agent.cut:
            raise ContextExhausted(
                f"what agent {name!r} reads has {length} characters, and no more than {most} fit into its context"
            )
        messages, prompt_ids, cut = await worked_on(
            length, lambda: fit_prompt(agent, inputs, encode=tokenizer.encode_chat, room=room)
        )
        text = "\n".join(m["content"] for m in messages)
        prompt = Prompt(text=text, token_ids=prompt_ids, inputs=inputs, cut=cut)
        turn, parsed = await self.turn(name, prompt, parse=agent.contract.parse)
        index = turn.turn_index
        self._texts[index] = (turn.completion_text, *parsed.fields.values())
        return Reply(
            turn_index=index,
            text=TracedText.by(turn.completion_text, index),
            fields={name: TracedText.by(value, index) for name, value in parsed.fields.items()},
            is_format_ok=turn.is_format_ok,
            is_truncated=turn.finish_reason is FinishReason.LENGTH,
            data=dict(parsed.data),
            num_tokens=len(turn.completion_token_ids),
        )

    async def turn(
        self,
        name: str,
        prompt: Prompt,
        *,
        parse: Callable[[str], Parsed],
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
        constraint: str = "",
    ) -> tuple[Turn, Parsed]:
        """Makes one model call of agent `name` and records it as a turn.

        Args:
            parse: reads the completion, as a contract does.
            max_tokens: a limit below the agent's own and the context's.
            stops: the completion ends with the token that completes one of these texts.
            constraint: what the completion must match, see `Sampling`.

        Raises ContextExhausted, CallTimeout or PolicyCallError, as a workflow's agent call does, and RequestRefused.
        """
        with self.spans.turn(name, self.team.group_of[name]) as span:
            return await self._turn(
                name, prompt, span, parse=parse, max_tokens=max_tokens, stops=stops, constraint=constraint
            )

    async def _turn(
        self,
        name: str,
        prompt: Prompt,
        span: Span,
        *,
        parse: Callable[[str], Parsed],
        max_tokens: int | None,
        stops: Sequence[str],
        constraint: str,
    ) -> tuple[Turn, Parsed]:
        index = self._next_event()
        round_index = self.rounds.get(name, 0)
        self.rounds[name] = round_index + 1
        group = self.team.group_of[name]
        tokenizer = self.team.tokenizers[group]
        sampling = self._fit(name, len(prompt.token_ids))
        if max_tokens is not None and max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        if constraint:
            sampling = replace(sampling, constraint=constraint)
        request = GenerateRequest(
            request_id=f"{self.spec.episode_id}-{index}",
            model_group=group,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            seed=_turn_seed(self.spec.seed, name, round_index),
        )
        start = time.perf_counter()
        call = AgentCall(agent=name, inputs=prompt.inputs, task=self.spec.task, request=request)
        try:
            completion = _cut_at(await self._answered(index, call), tokenizer, stops)
        except (asyncio.CancelledError, RequestRefused):
            self._take_back(name, index, round_index)
            raise
        end = time.perf_counter()
        text = tokenizer.decode(completion.token_ids)
        parsed = parse(text)
        fault = str(parsed.fault or "")
        if completion.finish_reason is FinishReason.LENGTH:
            fault = fault or f"cut after {len(completion.token_ids)} tokens"
        self.turns[index] = Turn(
            turn_index=index,
            agent=name,
            model_group=group,
            policy_version=completion.policy_version,
            round_index=round_index,
            parents=tuple(sorted({*prompt.parents, *self._parents(prompt.inputs, index)})),
            prompt_text=prompt.text,
            completion_text=text,
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            sampling=sampling,
            seed=request.seed,
            finish_reason=completion.finish_reason,
            is_format_ok=not fault,
            format_fault=fault,
            fields=dict(parsed.fields),
            start_s=start - self.began,
            duration_s=end - start,
            num_attempts=completion.num_attempts,
            is_version_mixed=completion.is_version_mixed,
            cut=prompt.cut,
            num_cached_tokens=completion.num_cached_tokens,
        )
        span.record(self.turns[index])
        meant = self.team.policy_versions[group]
        if completion.policy_version != meant:
            raise PolicyCallError(
                f"turn {index}: version {completion.policy_version} of model group {group!r} answered, {meant} should act: "
                "a replica serves another version than the stage had made sure of"
            )
        self._texts[index] = (text,)
        return self.turns[index], parsed

    def used(
        self, tool: str, *, caller: str, turn: int, request: Mapping[str, Any], response: str, began: float
    ) -> int:
        """Records a tool call that a program made by itself between two turns; returns its index among the events.

        Args: turn: the turn that asked for it. began: `time.perf_counter()` when that turn was answered.
        """
        index = self._next_event()
        self.tool_calls[index] = ToolCall(
            call_index=index,
            tool=tool,
            caller=caller,
            parents=(turn,),
            request=request,
            response=response,
            error="",
            start_s=began - self.began,
            duration_s=time.perf_counter() - began,
        )
        self.spans.used(self.tool_calls[index])
        self._texts[index] = (response,)
        return index

    async def _answered(self, index: int, call: AgentCall) -> Completion:
        """Returns the completion; whatever time the engines failed in is noted as waiting."""
        start = self._unanswered[index] = self.clock.seconds
        try:
            async with self.clock.deadline(self.limits.turn_timeout_s):
                with self.clock.is_current():
                    completion = await self._complete(call)
        except (TimeoutError, PolicyCallError, asyncio.CancelledError) as fault:
            self._waited.append((start, self.clock.seconds))
            if isinstance(fault, TimeoutError):
                limit = f"turn_timeout_s = {self.limits.turn_timeout_s:g} s"
                raise CallTimeout(f"turn {index}: no completion of {call.agent!r} within {limit}") from None
            raise
        finally:
            del self._unanswered[index]
        failed_share = 1 - 1 / max(1, completion.num_attempts)
        if failed_share:
            self._waited.append((start, start + failed_share * (self.clock.seconds - start)))
        return completion

    async def _complete(self, call: AgentCall) -> Completion:
        if self.playback is None:
            return await self.complete(call)
        return await self.playback.complete(call.agent, call.request, lambda: self.complete(call))

    def _fit(self, name: str, prompt_length: int) -> Sampling:
        """Returns the agent's sampling settings with `max_tokens` cut to the context.

        Raises ContextExhausted where nothing is left.
        """
        sampling = self.team.sampling[name]
        if self.spec.script is not None and self.spec.script.kind == "greedy":
            sampling = replace(sampling, temperature=0.0)
        room = self.team.max_model_len[self.team.group_of[name]] - prompt_length
        if room < 1:
            limit = self.team.max_model_len[self.team.group_of[name]]
            raise ContextExhausted(f"the prompt of {name!r} has {prompt_length} tokens, the context holds {limit}")
        return sampling if room >= sampling.max_tokens else replace(sampling, max_tokens=room)

    async def _use(self, name: str, tool: Tool, request: Mapping[str, Any]) -> Any:
        with self.spans.tool(name) as span:
            return await self._call_tool(name, tool, request, span)

    async def _call_tool(self, name: str, tool: Tool, request: Mapping[str, Any], span: Span) -> Any:
        index = self._next_event()
        start, started = time.perf_counter(), self.clock.seconds
        recorded = {key: UNRECORDED if key in tool.unrecorded else value for key, value in request.items()}
        call = ToolCall(
            call_index=index,
            tool=name,
            caller="",
            parents=self._parents(request, index),
            request=recorded,
            response=None,
            error="",
            start_s=start - self.began,
            duration_s=0.0,
        )
        response, error = None, ""
        kind: type[ToolError] = ToolError
        is_ours_to_wait = tool.timeout_cause == Cause.INFRASTRUCTURE
        with counted_attempts() as attempts, noted_version() as version:
            try:
                is_known, response = self.playback.response(name, recorded) if self.playback else (False, None)
                if not is_known:
                    async with asyncio.timeout(tool.timeout_s):
                        response = await tool(**request)
            except TimeoutError:
                error = f"no answer after {tool.timeout_s:g} s"
                kind = ToolFault if is_ours_to_wait else ToolError
            except asyncio.CancelledError:
                seconds = time.perf_counter() - start
                if is_ours_to_wait:
                    self._waited.append((started, self.clock.seconds))
                error = f"given up after {seconds:.1f} s"
                self.tool_calls[index] = replace(
                    call, error=error, num_attempts=max(1, attempts[0]), duration_s=seconds, version=version[0]
                )
                raise
            except ToolError as fault:
                error, kind = str(fault), ToolFault if isinstance(fault, ToolFault) else ToolError
            except (Exception, SystemExit) as fault:  # noqa: BLE001 - a tool that raises is a recorded tool_error, as an agent is
                error, kind = f"{type(fault).__name__}: {fault}", ToolRaised
        if kind is ToolFault:
            self._waited.append((started, self.clock.seconds))
        self.tool_calls[index] = replace(
            call,
            response=response,
            error=error,
            num_attempts=max(1, attempts[0]),
            duration_s=time.perf_counter() - start,
            version=version[0],
        )
        span.record(self.tool_calls[index])
        if error and tool.fail_open:
            return tool.fallback
        if error:
            raise kind(f"tool {name!r}: {error}")
        self._texts[index] = (response,) if isinstance(response, str) else ()
        return traced(response, index)

    def _next_event(self) -> int:
        self.num_events += 1
        return self.num_events - 1

    def _take_back(self, name: str, index: int, round_index: int) -> None:
        """Frees the numbers of a call that was given up, unless later calls have theirs: the next one is its repetition.

        With the numbers the repetition has the seed, and is compared with the turns that other episodes made at this place.
        """
        if self.num_events == index + 1 and self.rounds[name] == round_index + 1:
            self.num_events, self.rounds[name] = index, round_index

    def _parents(self, inputs: Mapping[str, Any], index: int) -> tuple[int, ...]:
        """Returns the events whose text stands in these inputs, whole or quoted."""
        parents = {*origins_of(inputs)}
        texts = [value for value in inputs.values() if isinstance(value, str)]
        for event, texts_of_event in self._texts.items():
            quotes = [t for t in texts_of_event if len(t) >= MIN_QUOTE]
            if event not in parents and any(quote in text for quote in quotes for text in texts):
                parents.add(event)
        return tuple(sorted(e for e in parents if e < index))

    def trace(
        self,
        status: EpisodeStatus,
        stop_reason: str,
        error: str,
        outcome: Outcome,
        started_at: float,
        attempt: int,
        *,
        cause: Cause,
    ) -> Trace:
        """Returns the record of the episode up to now. Args: started_at: seconds since 1970. attempt: counted from 1."""
        turns = tuple(self.turns[i] for i in sorted(self.turns))
        seen: dict[str, set[int]] = {}
        for turn in turns:
            seen.setdefault(turn.model_group, set()).add(turn.policy_version)
        meant = self.team.policy_versions
        mixed = any(v != {meant[group]} for group, v in seen.items()) or any(t.is_version_mixed for t in turns)
        acted = {group: max(versions) for group, versions in seen.items()}
        return Trace(
            episode_id=self.spec.episode_id,
            run_id=self.spec.run_id,
            iteration=self.spec.iteration,
            purpose=self.spec.purpose,
            team_key=self.spec.team_key,
            workflow=self.team.workflow_path,
            task=self.spec.task,
            group_id=self.spec.group_id,
            episode_index=self.spec.episode_index,
            variant=self.spec.variant,
            seed=self.spec.seed,
            status=status,
            stop_reason=stop_reason,
            error=error,
            answer=outcome.answer,
            outcome_metadata=outcome.metadata,
            policy_versions={**self.team.policy_versions, **acted},
            is_version_mixed=mixed,
            turns=turns,
            tool_calls=tuple(self.tool_calls[i] for i in sorted(self.tool_calls)),
            started_at=started_at,
            duration_s=time.perf_counter() - self.began,
            attempt=attempt,
            cause=cause,
        )


class Calls:
    """Calls agents or tools by name: `agents.solver(...)`, `tools.search(...)`, or `agents["solver"](...)`."""

    def __init__(self, call: Callable[..., Awaitable[Any]], known: Mapping[str, Any], recorder: Recorder) -> None:
        self._call, self._known, self.recorder = call, known, recorder
        self.episode = recorder.spec

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return self[name]

    def __getitem__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in self._known:
            raise AttributeError(f"no {name!r} in this workflow; it declares {', '.join(self._known) or 'none'}")

        def call(**inputs: Any) -> Awaitable[Any]:
            return self._call(name, self._known[name], inputs)

        return call


def _cut_at(completion: Completion, tokenizer: ChatTokenizer, stops: Sequence[str]) -> Completion:
    """Returns the completion up to the token that completes a stop text.

    Later tokens were sampled, but nobody reads them.
    """
    if not stops:
        return completion
    text = TextStream(tokenizer, stops)
    for length, token in enumerate(completion.token_ids, 1):
        text.push([token])
        if text.is_stopped:
            ids, logprobs = completion.token_ids[:length], completion.logprobs[:length]
            return replace(completion, token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)
    return completion


def _turn_seed(episode_seed: int, agent: str, round_index: int) -> int:
    """Returns the seed of a turn. It does not depend on which of several agents at work side by side is faster."""
    return int.from_bytes(sha256(f"{episode_seed}/{agent}/{round_index}".encode()).digest()[:4], "big") >> 1
