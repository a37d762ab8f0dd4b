"""responses_api: `POST /v1/responses`: a chat in the form of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.gateway.calls.chat import prepare_chat
from serve_apps.gateway.calls.chat_reply import complete_chat, stream_chunks
from serve_apps.gateway.http.api_state import ServiceDependency
from serve_apps.gateway.http.chat_api import chat_ended
from serve_apps.gateway.http.event_stream import named_events, released_unless_streamed
from serve_apps.gateway.http.long_bodies import LongBodyRoute
from serve_apps.gateway.traffic.api_keys import ApiKey
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import model_of
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.response_events import response_events
from serve_apps.openai_api.responses import Item, ResponsesRequest, chat_of, response_of

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers with an agent or a model group, at once or as server-sent events; tools, forms and limits are those of a chat."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    earlier = service.responses.items(body.previous_response_id, key.holder)
    chat_request, items = chat_of(body, earlier), [*earlier, *body.items]
    slot = await service.take_slot(production.name, body.user, key)
    with released_unless_streamed(service, slot) as start_stream:
        chat = await prepare_chat(chat_request, slot.team, *model_of(slot.team, body.model), kind="resp")
        if body.stream:
            parts = response_events(body, stream_chunks(chat, service.streams))
            events = named_events(service, slot, _kept(service, key, body, items, parts))
            return start_stream(events, chat.headers, partial(chat_ended, service, slot, key, chat))
        reply = await unless_gone(request, service.within_timeout(complete_chat(chat, service.streams)))
    chat_ended(service, slot, key, chat)
    response = response_of(body, reply)
    _keep(service, key, body, items, response)
    return JSONResponse(response, headers=chat.headers)


async def _kept(
    service: Service,
    key: ApiKey,
    body: ResponsesRequest,
    items: Sequence[Item],
    events: AsyncGenerator[dict[str, Any]],
) -> AsyncGenerator[dict[str, Any]]:
    """Yields the events of a response and keeps it at their end."""
    async with aclosing(events) as open_events:
        async for event in open_events:
            if event["type"] in ("response.completed", "response.incomplete"):
                _keep(service, key, body, items, event["response"])
            yield event


def _keep(
    service: Service, key: ApiKey, body: ResponsesRequest, items: Sequence[Item], response: dict[str, Any]
) -> None:
    if body.store is not False:
        service.responses.add(response["id"], key.holder, [*items, *response["output"]])
