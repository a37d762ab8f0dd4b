"""bare_api: `POST /v1/completions`, `/tokenize` and `/detokenize`: models without their chats, as vLLM's server has them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from serve_apps.chat.long_texts import worked_on
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.extensions.completions.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve_apps.gateway.calls.chat import chat_tokens, troupe_fields
from serve_apps.gateway.calls.model_call import (
    Choice,
    ModelCall,
    check_length,
    check_logprobs,
    room_for_completion,
    sample_choices,
)
from serve_apps.gateway.http.answering import LongBodyRoute, Parts, ServiceDependency, Work, answered, chat_events
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.callers import ApiKey
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import ServedTeam, model_of
from serve_apps.openai_api.constraints import tried_constraint
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError
from serve_apps.policy.policy_stream import PolicyStreams
from stores.types import Sampling

router = APIRouter(route_class=LongBodyRoute)


def add_to(api: FastAPI, _: Service) -> None:
    """Adds the routes to a gateway."""
    api.include_router(router)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, service: ServiceDependency) -> Response:
    """Continues prompts by the model of a group, without a chat template; agents answer chats."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    slot = await unless_gone(request, service.take_slot(production.name, body.user, key))

    async def prepare() -> Work:
        group, agent = model_of(slot.team, body.model)
        if agent is not None:
            raise ApiError(
                400,
                f"agent {body.model!r} answers chats, at /v1/chat/completions; for a bare completion ask its model group, "
                f"{slot.team.name}/group/{group}",
                code="invalid_value",
                param="model",
            )
        calls = await prepare_completion(body, slot.team, group)
        return Work(
            headers=calls[0].headers,
            reply=lambda: complete(calls, service.streams),
            events=lambda: chat_events(service, slot, stream_completion(calls, service.streams)),
            on_end=partial(_ended, service, slot, key, calls),
        )

    return await answered(service, request, slot, prepare, is_streamed=body.stream)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceDependency) -> Response:
    """Returns the tokens of a chat as an agent or a model group gets them, or those of a bare text."""
    with await _slot(service, body.model, request) as team:
        group, agent = model_of(team, body.model)
        tokenizer, context = team.acting.tokenizers[group], team.acting.max_model_len[group]

        def tokenized() -> bytes:
            if body.prompt is not None:
                check_length(body.prompt, tokenizer, context)
                tokens = tokenizer.encode(body.prompt)
            else:
                _, tokens = chat_tokens(body, team, group, agent)
            strings = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            reply = {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings}
            return json.dumps(reply).encode()

        reply = await worked_on(body.num_characters, tokenized)
    return Response(reply, media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: ServiceDependency) -> dict[str, str]:
    """Returns the text of tokens, special ones included."""
    with await _slot(service, body.model, request) as team:
        group, _ = model_of(team, body.model)
        tokenizer = team.acting.tokenizers[group]
        _check_known(body.tokens, tokenizer, body.model, param="tokens")
        return {"prompt": await worked_on(body.num_characters, lambda: tokenizer.text_of(body.tokens))}


async def _slot(service: Service, model: str, request: Request) -> Slot:
    """Takes a place as any request does: tokenizing is work."""
    production, key = service.authorize(request, "call", model=model, counts=True)
    return await unless_gone(request, service.take_slot(production.name, None, key))


def _ended(service: Service, slot: Slot, key: ApiKey, calls: list[ModelCall]) -> None:
    """Counts a completion that has ended, complete or not. It is not captured: it is no turn of an agent."""
    choices = [choice for call in calls for choice in call.choices.values()]
    figures = None
    if all(call.is_complete for call in calls):
        figures = {
            "completion_tokens": usage_of(calls)["completion_tokens"] / len(choices),
            "cut_share": sum(choice.finish_reason == "length" for choice in choices) / len(choices),
            "empty_share": sum(not choice.text for choice in choices) / len(choices),
        }
    service.count_answer(slot, key, usage_of(calls)["completion_tokens"], figures)


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
    _check_known(ids, tokenizer, request.model, param="prompt")
    room_for_completion(request.limit, len(ids), context)
    default = Sampling(max_tokens=request.limit, temperature=1.0)
    return ModelCall(
        request=request,
        team=team,
        model_group=model_group,
        prompt_token_ids=ids,
        sampling=request.sampling(default, max_tokens=request.limit, constraint=constraint),
        settings=request.engine_settings,
        top_logprobs=request.top_logprobs,
        id=f"cmpl-{secrets.token_hex(12)}",
    )


def _check_known(ids: Sequence[int], tokenizer: ChatTokenizer, model: str, *, param: str) -> None:
    """ApiError 400 for a token that the model does not have."""
    if unknown := [i for i in ids if i >= tokenizer.num_tokens]:
        raise ApiError(
            400,
            f"{param} has the token {unknown[0]}, and model {model!r} has {tokenizer.num_tokens}",
            code="invalid_value",
            param=param,
        )


async def complete(calls: Sequence[ModelCall], streams: PolicyStreams) -> dict[str, Any]:
    """Samples all choices of all prompts, one prompt after the other, and returns the whole reply."""
    for call in calls:
        async with aclosing(sample_choices(call, streams)) as pieces:
            async for piece in pieces:
                call.choices[piece.choice.index] = piece.choice
    choices = [
        {**_choice(call, choice, at=index), "finish_reason": choice.finish_reason, "stop_reason": choice.stop}
        for number, call in enumerate(calls)
        for index, choice in _numbered(call, number)
    ]
    return {**_envelope(calls), "choices": choices, "usage": usage_of(calls)}


async def stream_completion(calls: Sequence[ModelCall], streams: PolicyStreams) -> Parts:
    """Yields the reply as the chunks of `stream: true`, one prompt after the other."""
    options = calls[0].request.stream_options
    num_characters: dict[int, int] = {}  # of the tokens already sent, by index
    for number, call in enumerate(calls):
        async with aclosing(sample_choices(call, streams)) as pieces:
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
