"""bare_completions: a prompt without a chat template and the team whose model continues it -> model calls, and their reply."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from serve_apps.chat.long_texts import worked_on
from serve_apps.gateway.calls.call_spans import traced_choices
from serve_apps.gateway.calls.chat_reply import troupe_fields
from serve_apps.gateway.calls.model_call import (
    Choice,
    ModelCall,
    check_length,
    check_logprobs,
    room_for_completion,
)
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.completion_request import CompletionRequest
from serve_apps.openai_api.constraints import tried_constraint
from serve_apps.openai_api.protocol import ApiError
from serve_apps.policy.policy_stream import PolicyStreams
from stores.types import Sampling


async def prepare_completion(request: CompletionRequest, team: ServedTeam, model_group: str) -> list[ModelCall]:
    """Tokenizes the prompts of a request and settles how to sample them; ApiError 400 where one does not fit the model."""
    if request.logprobs is not None:
        check_logprobs(request.n * len(request.prompts) * request.limit, request.top_logprobs)
    constraint = ""
    if request.own_form:
        constraint = await tried_constraint(request, team.acting.tokenizers[model_group])
    return await worked_on(
        request.num_characters,
        lambda: [_call(request, team, model_group, prompt, constraint) for prompt in request.prompts],
    )


def _call(
    request: CompletionRequest, team: ServedTeam, model_group: str, prompt: str | list[int], constraint: str
) -> ModelCall:
    tokenizer, context = team.acting.tokenizers[model_group], team.acting.max_model_len[model_group]
    if isinstance(prompt, str):
        check_length(prompt, tokenizer, context)
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if unknown := [i for i in ids if i >= tokenizer.num_tokens]:
        raise ApiError(
            400,
            f"prompt has the token {unknown[0]}, and model {request.model!r} has {tokenizer.num_tokens}",
            code="invalid_value",
            param="prompt",
        )
    room_for_completion(request.limit, len(ids), context)
    sampling = Sampling(
        max_tokens=request.limit,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        constraint=constraint,
    )
    return ModelCall(
        request=request,
        team=team,
        model_group=model_group,
        prompt_token_ids=ids,
        sampling=sampling,
        settings=request.engine_settings,
        top_logprobs=request.top_logprobs,
        id=f"cmpl-{secrets.token_hex(12)}",
    )


async def complete(calls: Sequence[ModelCall], streams: PolicyStreams) -> dict[str, Any]:
    """Samples all choices of all prompts, one prompt after the other, and returns the whole reply."""
    for call in calls:
        async with aclosing(traced_choices(call, streams)) as pieces:
            async for piece in pieces:
                call.choices[piece.choice.index] = piece.choice
    choices = [
        {**_choice(call, choice, at=index), "finish_reason": choice.finish_reason, "stop_reason": choice.stop}
        for number, call in enumerate(calls)
        for index, choice in _numbered(call, number)
    ]
    return {**_envelope(calls), "choices": choices, "usage": usage_of(calls)}


async def stream_completion(calls: Sequence[ModelCall], streams: PolicyStreams) -> AsyncGenerator[dict[str, Any]]:
    """Yields the reply as the chunks of `stream: true`, one prompt after the other."""
    options = calls[0].request.stream_options
    num_characters: dict[int, int] = {}  # of the tokens already sent, by index
    for number, call in enumerate(calls):
        async with aclosing(traced_choices(call, streams)) as pieces:
            async for piece in pieces:
                choice = call.choices[piece.choice.index] = piece.choice
                index = number * call.request.n + choice.index
                start, is_first = num_characters.get(index, 0), index not in num_characters
                delta = Choice(index=choice.index, text=piece.text)
                if piece.delta is not None:
                    delta.token_ids, delta.logprobs = list(piece.delta.token_ids), list(piece.delta.logprobs)
                    delta.top_logprobs = list(piece.delta.top_logprobs)
                num_characters[index] = start + sum(len(call.tokenizer.token_text(token)) for token in delta.token_ids)
                body = _choice(call, delta, at=index, start=start, is_first=is_first)
                body["finish_reason"] = choice.finish_reason if piece.delta is None else None
                body["stop_reason"] = choice.stop if piece.delta is None else None
                usage = {"usage": usage_of(calls)} if options and options.continuous_usage_stats else {}
                yield {**_envelope(calls), "choices": [body], **usage}
    if options and options.include_usage:
        yield {**_envelope(calls), "choices": [], "usage": usage_of(calls)}


def usage_of(calls: Sequence[ModelCall]) -> dict[str, int]:
    """Adds up the tokens of several calls."""
    return {name: sum(call.usage[name] for call in calls) for name in calls[0].usage}


def _numbered(call: ModelCall, number: int) -> list[tuple[int, Choice]]:
    """Returns the choices of prompt `number` with their index among those of all prompts."""
    return [(number * call.request.n + index, choice) for index, choice in sorted(call.choices.items())]


def _envelope(calls: Sequence[ModelCall]) -> dict[str, Any]:
    first = calls[0]
    return {
        "id": first.id,
        "object": "text_completion",
        "created": first.created,
        "model": first.request.model,
        "system_fingerprint": first.team.fingerprint,
        "troupe": troupe_fields(first, [choice for call in calls for choice in call.choices.values()]),
    }


def _choice(call: ModelCall, choice: Choice, *, at: int, start: int = 0, is_first: bool = True) -> dict[str, Any]:
    request = call.request
    assert isinstance(request, CompletionRequest), "`prepare_completion` makes the calls"
    body: dict[str, Any] = {"index": at, "text": choice.text, "logprobs": None}
    if request.logprobs is not None:
        body["logprobs"] = _logprobs(call, choice, start)
    if request.return_token_ids:
        body["token_ids"] = choice.token_ids
        if is_first:
            body["prompt_token_ids"] = list(call.prompt_token_ids)
    return body


def _logprobs(call: ModelCall, choice: Choice, start: int) -> dict[str, Any]:
    """Returns the logprobs of a choice, or of a piece of it that begins `start` characters after the prompt."""
    texts = [call.tokenizer.token_text(token) for token in choice.token_ids]
    offsets = [*accumulate(map(len, texts), initial=start)][:-1]
    return {
        "tokens": texts,
        "token_logprobs": [max(value, -9999.0) for value in choice.logprobs],
        "top_logprobs": [
            {call.tokenizer.token_text(token): max(value, -9999.0) for token, value in top.items()}
            for top in choice.top_logprobs
        ],
        "text_offset": offsets,
    }
