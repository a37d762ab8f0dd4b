"""chat: a chat request and the team that answers it -> choices as they are sampled.

messages --template--> prompt ids --policy app--> token ids --> text, tool calls, logprobs, usage
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from serve_apps.gateway.policy_stream import Delta, PolicyStreams, SampleRequest
from serve_apps.gateway.teams import ServedTeam
from serve_apps.openai_api.protocol import ApiError, ChatRequest
from serve_apps.openai_api.tool_calls import OPEN, assistant_message
from serve_apps.text_stream import TextStream
from serve_apps.tokenizer import ChatTokenizer
from stores.types import Sampling


@dataclass(kw_only=True)
class Choice:
    """One completion of a request, complete or growing."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`, as sampled; `tool_calls` is found in the text."""
    policy_version: int = -1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one choice has grown by."""

    choice: Choice
    text: str
    delta: Delta | None
    """None where only text that was held back follows."""


@dataclass(kw_only=True)
class Chat:
    """One request, tokenized and ready to be sampled."""

    request: ChatRequest
    team: ServedTeam
    model_group: str
    agent: str | None
    prompt_token_ids: list[int]
    sampling: Sampling
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    choices: dict[int, Choice] = field(default_factory=dict)
    """As far as they have come."""
    seeds: list[int] = field(init=False)
    """One per choice; of a seed that was given, always the same."""

    def __post_init__(self) -> None:
        first = self.request.seed if self.request.seed is not None else secrets.randbits(31)
        self.seeds = [(first + i) % 2**31 for i in range(self.request.n)]

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Of the model group."""
        return self.team.acting.tokenizers[self.model_group]


def prepare(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> Chat:
    """Tokens and settings of a request; ApiError where they do not fit the model."""
    from jinja2 import TemplateError

    tokenizer = team.acting.tokenizers[model_group]
    tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
    has_calls = any(message.tool_calls or message.role == "tool" for message in request.messages)
    if (tools or has_calls) and not tokenizer.knows_tools:
        raise ApiError(
            400, f"the chat template of model {request.model!r} knows no tools", code="tools_unsupported", param="tools"
        )
    messages = [message.for_template() for message in request.messages]
    if agent is not None:
        messages = team.acting.workflow.agents[agent].introduced(messages)
    try:
        prompt = tokenizer.encode_chat(messages, tools=tools)
    except (TemplateError, TypeError) as error:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} refuses these messages: {error}",
            code="invalid_value",
            param="messages",
        ) from None
    limit = team.acting.max_model_len[model_group]
    room = limit - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"these messages have {len(prompt)} tokens, and the context of model {request.model!r} holds {limit}: shorten "
            "them",
            code="context_length_exceeded",
            param="messages",
        )
    if request.limit is not None and request.limit > room:
        raise ApiError(
            400,
            f"these messages have {len(prompt)} tokens and max_tokens is {request.limit}, together more than the {limit} of "
            f"model {request.model!r}: ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    default = team.acting.sampling[agent] if agent is not None else Sampling(max_tokens=room, temperature=1.0)
    sampling = replace(
        default,
        max_tokens=request.limit or min(default.max_tokens, room),
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
    )
    return Chat(
        request=request, team=team, model_group=model_group, agent=agent, prompt_token_ids=prompt, sampling=sampling
    )


async def sample(chat: Chat, streams: PolicyStreams) -> AsyncGenerator[Piece]:
    """Pieces of all choices in the order in which they come. Closing the iterator ends the sampling of all of them."""
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(_sample_one(chat, Choice(index=i), seed, streams, pieces))
        for i, seed in enumerate(chat.seeds)
    ]
    for task in tasks:
        task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        num_left = len(tasks)
        while num_left:
            piece = await pieces.get()
            if piece is not None:
                yield piece
                continue
            num_left -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample_one(
    chat: Chat, choice: Choice, seed: int, streams: PolicyStreams, pieces: asyncio.Queue[Piece | None]
) -> None:
    text = TextStream(chat.tokenizer, chat.request.stops)
    penalties = {
        name: value
        for name in ("presence_penalty", "frequency_penalty")
        if (value := getattr(chat.request, name)) != 0.0
    }
    request = SampleRequest(
        model_group=chat.model_group,
        prompt_token_ids=chat.prompt_token_ids,
        sampling=chat.sampling,
        seed=seed,
        top_logprobs=chat.request.top_logprobs,
        penalties=penalties,
        is_whole=not (chat.request.stream or chat.request.stops),
    )
    async with aclosing(streams.stream(chat.team.apps[chat.model_group], request)) as deltas:
        async for delta in deltas:
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.top_logprobs += delta.top_logprobs
            choice.policy_version = delta.policy_version
            shown = text.push(delta.token_ids)
            choice.text += shown
            choice.finish_reason = "stop" if text.is_stopped else delta.finish_reason
            pieces.put_nowait(Piece(choice=choice, text=shown, delta=delta))
            if choice.finish_reason:
                break
    if choice.finish_reason not in ("stop", "length"):
        raise ApiError(503, "the engine gave the request up", code="engine_unavailable", retry_after_s=2)
    rest = text.end()
    choice.text += rest
    pieces.put_nowait(Piece(choice=choice, text=rest, delta=None))


async def complete(chat: Chat, streams: PolicyStreams) -> dict[str, Any]:
    """The whole answer, as `POST /v1/chat/completions` returns it."""
    async with aclosing(sample(chat, streams)) as pieces:
        async for piece in pieces:
            chat.choices[piece.choice.index] = piece.choice
    return answer_body(chat)


def answer_body(chat: Chat) -> dict[str, Any]:
    """The answer of a chat whose choices are whole."""
    ordered = [chat.choices[i] for i in sorted(chat.choices)]
    return {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.request.model,
        "system_fingerprint": chat.team.fingerprint,
        "choices": [_choice_body(chat, choice) for choice in ordered],
        "usage": usage(chat),
        "troupe": about(chat, ordered),
    }


async def chunks(chat: Chat, streams: PolicyStreams) -> AsyncGenerator[dict[str, Any]]:
    """The answer as chunks of `stream: true`.

    A choice that begins a tool call is held back from there on until it ends: half of a call is of no use to anybody.
    """
    shown: dict[int, int] = {}
    begun: set[int] = set()
    with_tools = bool(chat.request.offered_tools)
    async with aclosing(sample(chat, streams)) as pieces:
        async for piece in pieces:
            choice = chat.choices[piece.choice.index] = piece.choice
            if choice.index not in begun:
                begun.add(choice.index)
                yield _chunk(chat, choice, {"role": "assistant", "content": ""})
            start = shown.setdefault(choice.index, 0)
            end = _safe_end(choice.text) if with_tools else len(choice.text)
            logprobs = _logprobs_of(chat, piece.delta) if chat.request.logprobs and piece.delta else None
            if end > start or logprobs:
                shown[choice.index] = max(start, end)
                yield _chunk(chat, choice, {"content": choice.text[start:end]}, logprobs=logprobs)
            if piece.delta is None:
                for chunk in _last_chunks(chat, choice, shown[choice.index], with_tools=with_tools):
                    yield chunk
    if chat.request.stream_options and chat.request.stream_options.include_usage:
        yield {**_envelope(chat), "choices": [], "usage": usage(chat)}


def _last_chunks(chat: Chat, choice: Choice, shown: int, *, with_tools: bool) -> list[dict[str, Any]]:
    found = []
    reason = choice.finish_reason
    if with_tools:
        message, reason = _message(chat, choice)
        if calls := message.get("tool_calls"):
            indexed = [{"index": i, **call} for i, call in enumerate(calls)]
            found.append(_chunk(chat, choice, {"tool_calls": indexed}))
        elif choice.text[shown:]:
            found.append(_chunk(chat, choice, {"content": choice.text[shown:]}))
    last = _chunk(chat, choice, {}, finish_reason=reason)
    return [*found, {**last, "troupe": about(chat, [choice])}]


def _safe_end(text: str) -> int:
    """Up to where text cannot be the beginning of a tool call."""
    at = text.find(OPEN)
    if at >= 0:
        return at
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if text.endswith(OPEN[:length]):
            return len(text) - length
    return len(text)


def _choice_body(chat: Chat, choice: Choice) -> dict[str, Any]:
    message, reason = _message(chat, choice)
    logprobs = None
    if chat.request.logprobs:
        logprobs = _logprobs(chat, choice.token_ids, choice.logprobs, choice.top_logprobs)
    return {"index": choice.index, "message": message, "finish_reason": reason, "logprobs": logprobs}


def _message(chat: Chat, choice: Choice) -> tuple[dict[str, Any], str]:
    """The assistant's message, and why it ended."""
    names = {tool.function.name for tool in chat.request.offered_tools}
    message = assistant_message(choice.text, names, id_prefix=f"call_{chat.id[-12:]}_{choice.index}")
    has_ended = choice.finish_reason == "stop"
    return message, "tool_calls" if has_ended and "tool_calls" in message else choice.finish_reason


def _logprobs_of(chat: Chat, delta: Delta) -> dict[str, Any]:
    return _logprobs(chat, delta.token_ids, delta.logprobs, delta.top_logprobs)


def _logprobs(
    chat: Chat, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]]
) -> dict[str, Any]:
    places = []
    for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        likely = [_place(chat, other, value) for other, value in top[i].items()] if top else []
        places.append({**_place(chat, token, logprob), "top_logprobs": likely})
    return {"content": places, "refusal": None}


def _place(chat: Chat, token: int, logprob: float) -> dict[str, Any]:
    text = chat.tokenizer.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def _envelope(chat: Chat) -> dict[str, Any]:
    return {
        "id": chat.id,
        "object": "chat.completion.chunk",
        "created": chat.created,
        "model": chat.request.model,
        "system_fingerprint": chat.team.fingerprint,
    }


def _chunk(
    chat: Chat,
    choice: Choice,
    delta: dict[str, Any],
    *,
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    one = {"index": choice.index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return {**_envelope(chat), "choices": [one]}


def about(chat: Chat, choices: Sequence[Choice]) -> dict[str, Any]:
    """Beyond OpenAI's fields: which team and which weights answered."""
    return {
        **chat.team.about,
        "arm": chat.team.arm,
        "sampled_by": sorted({choice.policy_version for choice in choices}),
    }


def usage(chat: Chat) -> dict[str, int]:
    """Tokens, as far as they have come."""
    prompt, completion = len(chat.prompt_token_ids), sum(len(choice.token_ids) for choice in chat.choices.values())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
