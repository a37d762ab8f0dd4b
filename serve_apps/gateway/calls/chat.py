"""chat: a chat request and the team that answers it -> a model call, its reply in OpenAI's form, and its trace.

messages --template--> prompt ids --policy app--> token ids --> text --> a reply, at once or chunk by chunk
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from serve_apps.chat.long_texts import worked_on
from serve_apps.engines.port import Piece
from serve_apps.gateway.calls.model_call import (
    Choice,
    ModelCall,
    check_length,
    check_logprobs,
    room_for_completion,
    sample_choices,
)
from serve_apps.gateway.calls.workflow_runs import SERVICE_RUN
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.answer_reader import AnswerReader
from serve_apps.openai_api.chat_request import ChatRequest, refusals_of_template
from serve_apps.openai_api.constraints import prepared_constraint
from serve_apps.openai_api.protocol import ApiError
from serve_apps.policy.policy_stream import PolicyStreams
from stores.types import EpisodeStatus, FinishReason, Purpose, Sampling, Task, Trace, Turn

PROMPT_END = 256
"""Characters at the end of a prompt in which marks of thoughts are looked for."""


@dataclass(kw_only=True)
class Chat(ModelCall):
    """The model call of a chat."""

    operation = "chat"
    request: ChatRequest
    reader: AnswerReader

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of prompt and completions, as far as they have been sampled, and how many of them are thoughts."""
        return super().usage | self.reader.usage([choice.token_ids for choice in self.choices.values()])


def chat_prompt(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> str:
    """Returns the prompt of a chat as marked text (see `ChatTokenizer.mark_chat`); ApiError 400 where it has none."""
    tokenizer = team.acting.tokenizers[model_group]
    has_calls = any(message.tool_calls or message.role == "tool" for message in request.messages)
    if (request.tools or has_calls) and not tokenizer.knows_tools:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} does not support tools",
            code="tools_unsupported",
            param="tools",
        )
    messages = [message.for_template() for message in request.messages]
    own: Mapping[str, Any] = {}
    if agent is not None:
        messages = team.acting.workflow.agents[agent].introduced(messages)
        own = team.acting.chat_template_kwargs.get(agent, {})
    settings = request.prompt_settings(tokenizer, own)
    with refusals_of_template():
        return tokenizer.mark_chat(messages, tools=request.shown_tools, settings=settings)


def chat_tokens(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> tuple[str, list[int]]:
    """Returns the prompt of a chat as marked text and as tokens; ApiError 400 where it has none, or does not fit the context."""
    tokenizer, context = team.acting.tokenizers[model_group], team.acting.max_model_len[model_group]
    marked = chat_prompt(request, team, model_group, agent)
    if len(marked) > context:
        check_length(tokenizer.plain(marked), tokenizer, context)
    return marked, tokenizer.encode_marked(marked)


async def prepare_chat(
    request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None, *, kind: str = "chatcmpl"
) -> Chat:
    """Tokenizes a request and settles how to sample it; ApiError 400 where it does not fit the model.

    Args: kind: what the id of the reply begins with.
    """
    tokenizer = team.acting.tokenizers[model_group]
    marked, prompt = await worked_on(request.num_characters, lambda: chat_tokens(request, team, model_group, agent))
    max_completion = room_for_completion(request.limit, len(prompt), team.acting.max_model_len[model_group])
    default = team.acting.sampling[agent] if agent is not None else Sampling(max_tokens=max_completion, temperature=1.0)
    max_tokens = request.limit or min(default.max_tokens, max_completion)
    if request.logprobs:
        check_logprobs(request.n * max_tokens, request.top_logprobs)
    prompt_end = tokenizer.plain(marked[-PROMPT_END:])
    reader = AnswerReader.of(request, tokenizer, team.acting.parsers_of(model_group), prompt_end)
    constraint = await prepared_constraint(request, reader)
    variables = request.template_variables
    return Chat(
        request=request,
        team=team,
        model_group=model_group,
        agent=agent,
        prompt_token_ids=prompt,
        sampling=request.sampling(default, max_tokens=max_tokens, constraint=constraint),
        reader=reader,
        top_logprobs=request.top_logprobs,
        id=f"{kind}-{secrets.token_hex(12)}",
        settings=request.engine_settings,
        ignored=[*request.dropped, *sorted(variables.keys() - tokenizer.known_variables(variables).keys())],
    )


CHARACTERS_OF_A_LOGPROB = 100
"""About so many are written for each."""


async def complete_chat(chat: Chat, streams: PolicyStreams) -> dict[str, Any]:
    """Samples all choices and returns the whole reply, as `POST /v1/chat/completions` does."""
    async with aclosing(sample_choices(chat, streams)) as pieces:
        async for piece in pieces:
            chat.choices[piece.choice.index] = piece.choice
    num_values = chat.usage["completion_tokens"] * (1 + chat.top_logprobs) if chat.request.logprobs else 0
    return await worked_on(CHARACTERS_OF_A_LOGPROB * num_values, lambda: reply_body(chat))


def reply_body(chat: Chat, *, with_logprobs: bool = True) -> dict[str, Any]:
    """Returns the reply to a chat whose choices are complete."""
    ordered = [chat.choices[i] for i in sorted(chat.choices)]
    return {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.request.model,
        "system_fingerprint": chat.team.fingerprint,
        "choices": [_choice_body(chat, choice, with_logprobs=with_logprobs) for choice in ordered],
        "usage": chat.usage,
        **_prompt_ids(chat),
        "troupe": troupe_fields(chat, ordered),
    }


async def stream_chunks(chat: Chat, streams: PolicyStreams) -> AsyncGenerator[dict[str, Any]]:
    """Yields the reply as the chunks of `stream: true`.

    Where a choice begins a tool call, its text from there on is held back until the choice ends: callers need whole calls.
    """
    sent: dict[int, tuple[str, str]] = {}  # thoughts and content, by choice
    async with aclosing(sample_choices(chat, streams)) as pieces:
        async for piece in pieces:
            choice = chat.choices[piece.choice.index] = piece.choice
            if choice.index not in sent:
                yield {**_chunk(chat, choice, {"role": "assistant", "content": ""}), **_prompt_ids(chat)}
            before = sent.get(choice.index, ("", ""))
            shown = sent[choice.index] = chat.reader.shown(choice.text)
            about_tokens = _about_tokens(chat, piece.delta) if piece.delta else {}
            if (delta := _delta(chat, before, shown)) or about_tokens:
                yield _chunk(chat, choice, delta or {"content": ""}, **about_tokens)
            if piece.delta is None:
                for chunk in _last_chunks(chat, choice, shown):
                    yield chunk
    if chat.request.stream_options and chat.request.stream_options.include_usage:
        yield {**_envelope(chat), "choices": [], "usage": chat.usage}


def _delta(chat: Chat, before: tuple[str, str], now: tuple[str, str]) -> dict[str, str]:
    """The part of a message by which it has grown; empty where it has not."""
    thoughts, content = (new[len(old) :] for old, new in zip(before, now, strict=True))
    return chat.reader.reasoning(thoughts) | ({"content": content} if content else {})


def _last_chunks(chat: Chat, choice: Choice, shown: tuple[str, str]) -> list[dict[str, Any]]:
    """The chunks that end a choice: what was held back, as tool calls or text, and the finish reason."""
    chunks = []
    message, reason = _message(chat, choice)
    calls = message.get("tool_calls")
    content = _with_what_follows(shown[1], message["content"] or "") if calls else message["content"]
    if delta := _delta(chat, shown, (message.get("reasoning") or shown[0], content)):
        chunks.append(_chunk(chat, choice, delta))
    if calls:
        chunks.append(_chunk(chat, choice, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
    last = _chunk(chat, choice, {}, finish_reason=reason, stop_reason=choice.stop)
    return [*chunks, {**last, "troupe": troupe_fields(chat, [choice])}]


def _with_what_follows(sent: str, content: str) -> str:
    """Returns the text that was sent before a call, with what `content`, which is stripped, holds from after it."""
    before = sent.strip()
    if not content.startswith(before):
        return sent
    return sent + content[len(before) :].removeprefix(sent[len(sent.rstrip()) :])


def _choice_body(chat: Chat, choice: Choice, *, with_logprobs: bool) -> dict[str, Any]:
    message, reason = _message(chat, choice)
    logprobs = None
    if chat.request.logprobs and with_logprobs:
        logprobs = chat.reader.logprobs(choice.token_ids, choice.logprobs, choice.top_logprobs)
    body = {
        "index": choice.index,
        "message": message,
        "finish_reason": reason,
        "stop_reason": choice.stop,
        "logprobs": logprobs,
    }
    return body | ({"token_ids": list(choice.token_ids)} if chat.request.return_token_ids else {})


def _message(chat: Chat, choice: Choice) -> tuple[dict[str, Any], str]:
    """Returns the assistant's message and its finish reason."""
    message = chat.reader.message(choice.text, id_prefix=f"{chat.id}_{choice.index}")
    has_ended = choice.finish_reason == "stop"
    return message, "tool_calls" if has_ended and "tool_calls" in message else choice.finish_reason


def _about_tokens(chat: Chat, delta: Piece) -> dict[str, Any]:
    """Returns what a chunk says about its tokens, where the request asks for it."""
    about: dict[str, Any] = {}
    if chat.request.logprobs:
        about["logprobs"] = chat.reader.logprobs(delta.token_ids, delta.logprobs, delta.top_logprobs)
    if chat.request.return_token_ids:
        about["token_ids"] = list(delta.token_ids)
    return about


def _prompt_ids(chat: Chat) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(chat.prompt_token_ids)} if chat.request.return_token_ids else {}


def _envelope(chat: Chat) -> dict[str, Any]:
    return {
        "id": chat.id,
        "object": "chat.completion.chunk",
        "created": chat.created,
        "model": chat.request.model,
        "system_fingerprint": chat.team.fingerprint,
    }


def _chunk(
    chat: Chat, choice: Choice, delta: dict[str, Any], *, finish_reason: str | None = None, **more: Any
) -> dict[str, Any]:
    body = {"index": choice.index, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **more}
    options = chat.request.stream_options
    usage = {"usage": chat.usage} if options and options.continuous_usage_stats else {}
    return {**_envelope(chat), "choices": [body], **usage}


def troupe_fields(call: ModelCall, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the `troupe` object, which OpenAI's replies do not have: which team and which policy versions answered."""
    return {**call.team.reply_fields, "sampled_by": sorted({choice.policy_version for choice in choices})}


def trace_of(chat: Chat, *, task_id: str, seconds: float) -> Trace:
    """Returns the chat as an episode of run `service`; its id is that of the reply."""
    acting = chat.team.acting
    turns = _turns_of(chat, seconds)
    is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in turns)
    versions = {turn.policy_version for turn in turns}
    return Trace(
        episode_id=chat.id,
        run_id=SERVICE_RUN,
        iteration=0,
        purpose=Purpose.AD_HOC,
        team_key=acting.team_key,
        workflow=acting.workflow_path,
        task=Task(task_id=task_id, prompt=chat.request.last_user_text, answers=(), source=SERVICE_RUN),
        group_id=task_id,
        episode_index=0,
        variant="",
        seed=chat.seeds[0],
        status=EpisodeStatus.TRUNCATED if is_cut else EpisodeStatus.OK,
        stop_reason="length" if is_cut else "",
        error="",
        answer=turns[0].completion_text,
        outcome_metadata={"model": chat.request.model},
        policy_versions={chat.model_group: max(versions)},
        is_version_mixed=len(versions) > 1 or any(turn.is_version_mixed for turn in turns),
        turns=turns,
        tool_calls=(),
        started_at=time.time() - seconds,
        duration_s=seconds,
    )


def is_trainable(chat: Chat) -> bool:
    """Whether the trace of a chat can be trained on.

    It can if one choice was sampled, by an agent, from the policy's own distribution: no filter or penalty changed it.
    A constraint is part of the turn: the trainer applies it, too.
    """
    return chat.agent is not None and chat.request.n == 1 and chat.sampling.is_unfiltered and not chat.settings


def _turns_of(chat: Chat, seconds: float) -> tuple[Turn, ...]:
    prompt = chat.tokenizer.decode(chat.prompt_token_ids)
    return tuple(
        Turn(
            turn_index=index,
            agent=chat.agent or "",
            model_group=chat.model_group,
            policy_version=choice.policy_version,
            round_index=0,
            parents=(),
            prompt_text=prompt,
            completion_text=choice.text,
            prompt_token_ids=tuple(chat.prompt_token_ids),
            completion_token_ids=tuple(choice.token_ids),
            rollout_logprobs=tuple(choice.logprobs),
            sampling=chat.sampling,
            seed=chat.seeds[index],
            finish_reason=FinishReason(choice.finish_reason),
            is_format_ok=True,
            format_fault="",
            fields={},
            start_s=0.0,
            duration_s=seconds,
            is_version_mixed=choice.is_version_mixed,
        )
        for index, choice in sorted(chat.choices.items())
    )
