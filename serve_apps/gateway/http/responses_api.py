"""responses_api: `POST /v1/responses`: a chat in the form of OpenAI's Responses API."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serve_apps.gateway.http.answering import Events, LongBodyRoute, Parts, ServiceDependency, named_events
from serve_apps.gateway.http.chat_api import answer_chat
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.response_events import response_events
from serve_apps.openai_api.responses import ResponsesRequest, chat_of, response_of

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers with an agent or a model group, at once or as server-sent events; tools, forms and limits are those of a chat."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    earlier = service.responses.items(body.previous_response_id, key.holder)

    def keep(response: dict[str, Any]) -> dict[str, Any]:
        if body.store is not False:
            service.responses.add(response["id"], key.holder, [*earlier, *body.items, *response["output"]])
        return response

    async def kept(events: Parts) -> Parts:
        async with aclosing(events) as open_events:
            async for event in open_events:
                if event["type"] in ("response.completed", "response.incomplete"):
                    keep(event["response"])
                yield event

    def events(service: Service, slot: Slot, chunks: Parts) -> Events:
        return named_events(service, slot, kept(response_events(body, chunks)))

    return await answer_chat(
        service,
        request,
        body,
        team=production.name,
        key=key,
        asked=chat_of(body, earlier),
        kind="resp",
        events=events,
        form=lambda reply: keep(response_of(body, reply)),
    )
