"""chat_reply: a chat and the tokens sampled for it -> the reply in OpenAI's form, at once or chunk by chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from serve_apps.chat.long_texts import worked_on
from serve_apps.gateway.calls.call_spans import traced_choices
from serve_apps.gateway.calls.chat import Chat
from serve_apps.gateway.calls.model_call import Choice, ModelCall
from serve_apps.policy.policy_stream import Delta, PolicyStreams

CHARACTERS_OF_A_LOGPROB = 100
"""About so many are written for each."""


async def complete_chat(chat: Chat, streams: PolicyStreams) -> dict[str, Any]:
    """Samples all choices and returns the whole reply, as `POST /v1/chat/completions` does."""
    async with aclosing(traced_choices(chat, streams)) as pieces:
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
    async with aclosing(traced_choices(chat, streams)) as pieces:
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
    content = shown[1] if calls else message["content"]
    if delta := _delta(chat, shown, (message.get("reasoning") or shown[0], content)):
        chunks.append(_chunk(chat, choice, delta))
    if calls:
        chunks.append(_chunk(chat, choice, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
    last = _chunk(chat, choice, {}, finish_reason=reason, stop_reason=choice.stop)
    return [*chunks, {**last, "troupe": troupe_fields(chat, [choice])}]


def _choice_body(chat: Chat, choice: Choice, *, with_logprobs: bool) -> dict[str, Any]:
    message, reason = _message(chat, choice)
    logprobs = None
    if chat.request.logprobs and with_logprobs:
        logprobs = _logprobs(chat, choice.token_ids, choice.logprobs, choice.top_logprobs)
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


def _about_tokens(chat: Chat, delta: Delta) -> dict[str, Any]:
    """Returns what a chunk says about its tokens, where the request asks for it."""
    about: dict[str, Any] = {}
    if chat.request.logprobs:
        about["logprobs"] = _logprobs(chat, delta.token_ids, delta.logprobs, delta.top_logprobs)
    if chat.request.return_token_ids:
        about["token_ids"] = list(delta.token_ids)
    return about


def _prompt_ids(chat: Chat) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(chat.prompt_token_ids)} if chat.request.return_token_ids else {}


def _logprobs(
    chat: Chat, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]]
) -> dict[str, Any]:
    content = []
    for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        likeliest = [_token_logprob(chat, other, value) for other, value in top[i].items()] if top else []
        content.append({**_token_logprob(chat, token, logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _token_logprob(chat: Chat, token: int, logprob: float) -> dict[str, Any]:
    """One token in OpenAI's form; -9999 stands for minus infinity, which JSON does not have."""
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
    chat: Chat, choice: Choice, delta: dict[str, Any], *, finish_reason: str | None = None, **more: Any
) -> dict[str, Any]:
    body = {"index": choice.index, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **more}
    options = chat.request.stream_options
    usage = {"usage": chat.usage} if options and options.continuous_usage_stats else {}
    return {**_envelope(chat), "choices": [body], **usage}


def troupe_fields(call: ModelCall, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the `troupe` object, which OpenAI's replies do not have: which team and which policy versions answered."""
    return {**call.team.reply_fields, "sampled_by": sorted({choice.policy_version for choice in choices})}
