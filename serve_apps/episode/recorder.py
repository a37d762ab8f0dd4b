"""recorder: what a workflow asks of agents and tools -> answers, and the turns and tool calls of its trace.

agents.solver(question=...) ──> prompt ids ──> complete ──> contract ──> Reply
              └──> turns, tool calls, parents, seconds, seeds: nothing the author must do
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from serve_apps.authoring.agent import Agent, AuthorError, Reply, Tool, TracedText, origins_of
from serve_apps.authoring.choices import OFFERED, Choice
from serve_apps.authoring.contracts import Parsed, Raw, Thinking
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.prompt_budget import fit_prompt
from serve_apps.authoring.thinking import OPEN
from serve_apps.authoring.workflow import Outcome
from serve_apps.chat.long_texts import worked_on
from serve_apps.chat.text_stream import TextStream
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.causes import CallTimeout
from serve_apps.episode.replay import Playback
from serve_apps.episode.team import ActingTeam, AgentCall, Complete
from serve_apps.episode.tool_recorder import EpisodeEvents, ToolRecorder
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import ContextExhausted, PolicyCallError, RequestRefused
from serve_apps.spans import EpisodeSpans, Span
from stores.traces.conventions import constraint_of
from stores.types import (
    Cause,
    Completion,
    EpisodeStatus,
    FinishReason,
    GenerateRequest,
    Sampling,
    Trace,
    Turn,
)

PROMPT_END = 16
"""Tokens at the end of a prompt in which the tag that begins thoughts is looked for."""
NO_OPTIONS: Mapping[str, int] = MappingProxyType({})


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
        self.task = replace(spec.task, metadata=deepcopy(spec.task.metadata))
        """A copy for this attempt: the other episodes of the group, and a further attempt, play the same task."""
        self.turns: dict[int, Turn] = {}
        self.events = EpisodeEvents()
        self.rounds: dict[str, int] = {}
        self.playback = None if spec.script is None else Playback(spec.script)
        self.tool_recorder = ToolRecorder(self.events, self.playback)
        self.spans: EpisodeSpans = EpisodeSpans()
        self.clock, self.began = self.events.clock, self.events.began
        self._in_order = asyncio.Lock()
        """Calls side by side get their numbers, and so their seeds, in the order of the calls, however long their texts are."""

    @property
    def agents(self) -> Calls:
        """The `agents` that are passed to a workflow."""
        return Calls(self._ask, self.team.workflow.agents, self)

    @property
    def tools(self) -> Calls:
        """The `tools` that are passed to a workflow: its tools, and its environments."""
        workflow = self.team.workflow
        return Calls(self._use, {**workflow.tools, **workflow.environments}, self)

    def _use(self, name: str, known: Tool | Environment, inputs: Mapping[str, Any]) -> Any:
        if isinstance(known, Environment):
            return self.tool_recorder.open(name, known, inputs, self.spans)
        return self.tool_recorder.use(name, known, inputs, self.spans)

    async def _ask(self, name: str, agent: Agent, inputs: Mapping[str, str]) -> Reply:
        self.events.called()
        with self.spans.agent(name):
            return await self._reply(name, agent, inputs)

    async def _reply(self, name: str, agent: Agent, inputs: Mapping[str, Any]) -> Reply:
        group = self.team.group_of[name]
        tokenizer = self.team.tokenizers[group]
        options, further = NO_OPTIONS, list[dict[str, Any]]()
        if isinstance(agent.contract, Choice):
            try:
                offered, listed = agent.contract.offered(inputs)
                options = agent.contract.tokens(offered, tokenizer)
            except ValueError as wrong:
                raise AuthorError(f"agent {name!r}: {wrong}") from None
            inputs = listed | {OFFERED: TracedText.by(listed[OFFERED], *origins_of(inputs.get(OFFERED)))}
            if agent.contract.messages:
                further = agent.contract.longest_question
        encode = partial(tokenizer.encode_chat, settings=self.team.prompt_settings(name))
        limit = self.team.max_model_len[group]
        room = limit - min(self.team.sampling[name].max_tokens, limit // 2)  # of a small context half is for the prompt
        length, most = sum(len(str(value)) for value in inputs.values()), tokenizer.most_characters(limit)
        if most is not None and length > most and not agent.cut:
            raise ContextExhausted(
                f"what agent {name!r} reads has {length} characters, and no more than {most} fit into its context"
            )
        async with self._in_order:
            messages, prompt_ids, cut = await worked_on(
                length,
                lambda: fit_prompt(agent, inputs, encode=lambda chat: encode([*chat, *further]), room=room),
            )
        if further:
            prompt_ids = encode(messages)
        text = "\n".join(m["content"] for m in messages)
        prompt = Prompt(text=text, token_ids=prompt_ids, inputs=inputs, cut=cut)
        contract = agent.contract
        if isinstance(contract, Thinking):
            contract = replace(contract, is_begun=tokenizer.decode(prompt_ids[-PROMPT_END:]).rstrip().endswith(OPEN))
        turn, parsed = await self.turn(name, prompt, parse=contract.parse, options=options)
        index = turn.turn_index
        if not options:  # the name of an option stands in every list of them, and is not quoted from there
            self.events.wrote(index, turn.completion_text, *parsed.fields.values())
        reply = Reply(
            turn_index=index,
            text=TracedText.by(turn.completion_text, index),
            fields={name: TracedText.by(value, index) for name, value in parsed.fields.items()},
            is_format_ok=turn.is_format_ok,
            is_truncated=turn.finish_reason is FinishReason.LENGTH,
            data=dict(parsed.data),
            num_tokens=len(turn.completion_token_ids),
        )
        if isinstance(agent.contract, Choice) and parsed.fields["choice"] in agent.contract.messages:
            return await self._with_message(name, agent.contract, prompt, messages, reply)
        return reply

    async def _with_message(
        self, name: str, choice: Choice, prompt: Prompt, messages: Sequence[Mapping[str, Any]], chosen: Reply
    ) -> Reply:
        """Asks for the message of an option that was chosen, in a second turn that continues the first."""
        further = choice.question(str(chosen["choice"]))
        tokenizer = self.team.tokenizers[self.team.group_of[name]]
        token_ids = tokenizer.encode_chat([*messages, *further], settings=self.team.prompt_settings(name))
        text = "\n".join([prompt.text, *(message["content"] for message in further)])
        second = replace(prompt, text=text, token_ids=token_ids, parents=(chosen.turn_index,))
        turn, parsed = await self.turn(name, second, parse=Raw().parse)
        message = TracedText.by(parsed.fields["text"], turn.turn_index)
        self.events.wrote(turn.turn_index, turn.completion_text, message)
        return replace(
            chosen,
            fields={**chosen.fields, "message": message},
            is_format_ok=chosen.is_format_ok and turn.is_format_ok,
            is_truncated=turn.finish_reason is FinishReason.LENGTH,
            num_tokens=chosen.num_tokens + len(turn.completion_token_ids),
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
        options: Mapping[str, int] = NO_OPTIONS,
    ) -> tuple[Turn, Parsed]:
        """Makes one model call of agent `name` and records it as a turn.

        Args:
            parse: reads the completion, as a contract does.
            max_tokens: a limit below the agent's own and the context's.
            stops: the completion ends with the token that completes one of these texts.
            constraint: what the completion must match, see `Sampling`.
            options: for a choice, the token of each option that is offered.

        Raises ContextExhausted, CallTimeout or PolicyCallError, as a workflow's agent call does, and RequestRefused.
        """
        with self.spans.turn(name, self.team.group_of[name]) as span:
            return await self._turn(
                name,
                prompt,
                span,
                parse=parse,
                max_tokens=1 if options else max_tokens,
                stops=stops,
                constraint=constraint_of(options.values()) if options else constraint,
                options=options,
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
        options: Mapping[str, int],
    ) -> tuple[Turn, Parsed]:
        index = self.events.next()
        round_index = self.rounds.get(name, 0)
        self.rounds[name] = round_index + 1
        place = round_index
        if self.playback is not None:
            place = self.playback.round_of(name, prompt.token_ids, round_index)
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
            seed=_turn_seed(self.spec.seed, name, place),
        )
        # Now: what a call beside it answers meanwhile was not read.
        parents = tuple(sorted({*prompt.parents, *self.events.parents_of(prompt.inputs, index)}))
        start = time.perf_counter()
        call = AgentCall(agent=name, inputs=prompt.inputs, task=self.spec.task, request=request, options=options)
        try:
            completion = _cut_at(await self._answered(index, place, call), tokenizer, stops)
        except (asyncio.CancelledError, RequestRefused):
            self._take_back(name, index, round_index, place)
            raise
        end = time.perf_counter()
        if options:  # an engine ends a completion of one token at its limit
            completion = replace(completion, finish_reason=FinishReason.STOP)
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
            round_index=place,
            parents=parents,
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
            option_logprobs=dict(zip(options, completion.allowed_logprobs, strict=False)),
        )
        span.record(self.turns[index])
        meant = self.team.policy_versions[group]
        if completion.policy_version != meant:
            raise PolicyCallError(
                f"turn {index}: version {completion.policy_version} of model group {group!r} answered, {meant} should act: "
                "a replica serves another version than the stage had made sure of"
            )
        self.events.wrote(index, text)
        return self.turns[index], parsed

    async def _answered(self, index: int, place: int, call: AgentCall) -> Completion:
        """Returns the completion; whatever time the engines failed in is noted as waiting."""
        start = self.events.unanswered[index] = self.clock.seconds
        try:
            async with self.clock.deadline(self.limits.turn_timeout_s):
                with self.clock.is_current():
                    completion = await self._complete(place, call)
        except (TimeoutError, PolicyCallError, asyncio.CancelledError) as fault:
            self.events.waited(start)
            if isinstance(fault, TimeoutError):
                limit = f"turn_timeout_s = {self.limits.turn_timeout_s:g} s"
                raise CallTimeout(f"turn {index}: no completion of {call.agent!r} within {limit}") from None
            raise
        finally:
            del self.events.unanswered[index]
        failed_share = 1 - 1 / max(1, completion.num_attempts)
        if failed_share:
            self.events.waited(start, start + failed_share * (self.clock.seconds - start))
        return completion

    async def _complete(self, place: int, call: AgentCall) -> Completion:
        if self.playback is None:
            return await self.complete(call)
        return await self.playback.complete(call.agent, place, call.request, lambda: self.complete(call))

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

    def _take_back(self, name: str, index: int, round_index: int, place: int) -> None:
        """Frees the numbers of a call that was given up, unless later calls have theirs: the next one is its repetition.

        With the numbers the repetition has the seed, and is compared with the turns that other episodes made at this place.
        """
        if self.events.count == index + 1 and self.rounds[name] == round_index + 1:
            self.events.count, self.rounds[name] = index, round_index
            if self.playback is not None:
                self.playback.take_back(name, place)

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
        turns, calls = tuple(self.turns[i] for i in sorted(self.turns)), self.tool_recorder.calls
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
            tool_calls=tuple(calls[i] for i in sorted(calls)),
            started_at=started_at,
            duration_s=time.perf_counter() - self.began,
            attempt=attempt,
            cause=cause,
        )


class Calls:
    """Calls agents or tools by name: `agents.solver(...)`, `tools.search(...)`, or `agents["solver"](...)`; opens worlds."""

    def __init__(self, call: Callable[..., Any], known: Mapping[str, Any], recorder: Recorder) -> None:
        self._call, self._known, self.recorder = call, known, recorder
        self.episode = recorder.spec

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self[name]

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._known:
            raise AttributeError(f"no {name!r} in this workflow; it declares {', '.join(self._known) or 'none'}")

        def call(*unnamed: Any, **inputs: Any) -> Any:
            if unnamed:
                raise TypeError(
                    f"{name!r} was called with {str(unnamed[0])[:40]!r}: give every input its name, as in {name}(text=...)"
                )
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
