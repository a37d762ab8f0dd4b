"""responses_api: `POST /v1/responses` of the gateway: a chat in the form of OpenAI's Responses API."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from serve_apps.extensions.responses.kept_responses import KeptResponses
from serve_apps.extensions.responses.response_events import named_events, response_events
from serve_apps.extensions.responses.responses import ResponsesRequest, response_of
from serve_apps.gateway.http.answering import Events, LongBodyRoute, Parts, ServiceDependency, or_error
from serve_apps.gateway.http.chat_api import answer_chat
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.service import Service

router = APIRouter(route_class=LongBodyRoute)


def add_to(api: FastAPI, service: Service) -> None:
    """Adds the route to a gateway."""
    api.state.kept_responses = KeptResponses()
    api.include_router(router)


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers with an agent or a model group, at once or as server-sent events; tools, forms and limits are those of a chat."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    kept: KeptResponses = request.app.state.kept_responses
    asked, keep = kept.conversation(body, key.holder)

    async def kept_events(events: Parts) -> Parts:
        async with aclosing(events) as open_events:
            async for event in open_events:
                if event["type"] in ("response.completed", "response.incomplete"):
                    keep(event["response"])
                yield event

    def events(service: Service, slot: Slot, chunks: Parts) -> Events:
        return named_events(or_error(service, slot, kept_events(response_events(body, chunks))))

    return await answer_chat(
        service,
        request,
        body,
        team=production.name,
        key=key,
        asked=asked,
        kind="resp",
        events=events,
        form=lambda reply: keep(response_of(body, reply)),
    )
