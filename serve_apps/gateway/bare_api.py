"""bare_api: `POST /v1/completions`, `/tokenize` and `/detokenize`: models without their chats, as vLLM's server has them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.gateway.api_keys import ApiKey
from serve_apps.gateway.api_state import ServiceDependency
from serve_apps.gateway.bare_completions import complete, prepare_completion, stream_completion, usage_of
from serve_apps.gateway.chat import chat_prompt
from serve_apps.gateway.event_stream import chat_events, released_unless_streamed
from serve_apps.gateway.model_call import ModelCall
from serve_apps.gateway.service import Service
from serve_apps.gateway.slots import Slot
from serve_apps.gateway.teams import ServedTeam, model_of, team_of_model
from serve_apps.openai_api.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, service: ServiceDependency) -> Response:
    """Continues prompts by the model of a group, without a chat template; agents answer chats."""
    key = service.authorize(request, "call", counts=True)
    production = team_of_model(service.teams, body.model)
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
        calls = prepare_completion(body, slot.team, group)
        headers = calls[0].headers
        if body.stream:
            events = chat_events(service, slot, stream_completion(calls, service.streams))
            return start_stream(events, headers, partial(_ended, service, slot, key, calls))
        reply = await unless_gone(request, service.within_timeout(complete(calls, service.streams)))
    _ended(service, slot, key, calls)
    return JSONResponse(reply, headers=headers)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Returns the tokens of a chat as an agent or a model group gets them, or those of a bare text."""
    service.authorize(request, "call", counts=True)
    team, group, agent = _model(service, body.model)
    tokenizer = team.acting.tokenizers[group]

    def tokenized() -> tuple[list[int], list[str] | None]:
        if body.prompt is not None:
            tokens = tokenizer.encode(body.prompt)
        else:
            tokens = tokenizer.encode_marked(chat_prompt(body, team, group, agent))
        return tokens, [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None

    tokens, strings = await asyncio.to_thread(tokenized)
    context = team.acting.max_model_len[group]
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: ServiceDependency) -> dict[str, str]:
    """Returns the text of tokens, special ones included."""
    service.authorize(request, "call", counts=True)
    team, group, _ = _model(service, body.model)
    return {"prompt": await asyncio.to_thread(team.acting.tokenizers[group].text_of, body.tokens)}


def _model(service: Service, name: str) -> tuple[ServedTeam, str, str | None]:
    team = team_of_model(service.teams, name).champion
    return team, *model_of(team, name)


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
