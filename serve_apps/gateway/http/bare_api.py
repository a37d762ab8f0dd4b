"""bare_api: `POST /v1/completions`, `/tokenize` and `/detokenize`: models without their chats, as vLLM's server has them."""

from __future__ import annotations

import json
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.chat.long_texts import worked_on
from serve_apps.gateway.calls.bare_completions import complete, prepare_completion, stream_completion, usage_of
from serve_apps.gateway.calls.chat import chat_tokens
from serve_apps.gateway.calls.model_call import ModelCall, check_length
from serve_apps.gateway.http.api_state import ServiceDependency
from serve_apps.gateway.http.event_stream import chat_events, released_unless_streamed
from serve_apps.gateway.http.long_bodies import LongBodyRoute
from serve_apps.gateway.traffic.api_keys import ApiKey
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.slots import Slot
from serve_apps.gateway.traffic.teams import model_of
from serve_apps.openai_api.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, service: ServiceDependency) -> Response:
    """Continues prompts by the model of a group, without a chat template; agents answer chats."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    slot = await service.take_slot(production.name, body.user, key)
    with released_unless_streamed(service, slot) as start_stream:
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
        headers = calls[0].headers
        if body.stream:
            events = chat_events(service, slot, stream_completion(calls, service.streams))
            return start_stream(events, headers, partial(_ended, service, slot, key, calls))
        reply = await unless_gone(request, service.within_timeout(complete(calls, service.streams)))
    _ended(service, slot, key, calls)
    return JSONResponse(reply, headers=headers)


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
        text_of = team.acting.tokenizers[group].text_of
        return {"prompt": await worked_on(body.num_characters, lambda: text_of(body.tokens))}


async def _slot(service: Service, model: str, request: Request) -> Slot:
    """Takes a place as any request does: tokenizing is work."""
    production, key = service.authorize(request, "call", model=model, counts=True)
    return await service.take_slot(production.name, None, key)


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
