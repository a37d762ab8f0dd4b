"""messages_api: `POST /v1/messages`: a chat in the form of Anthropic's Messages API, where `gateway.extensions` names it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from serve_apps.chat.long_texts import worked_on
from serve_apps.engines.vllm.messages import load_converters
from serve_apps.extensions.messages.messages import (
    CountRequest,
    MessagesRequest,
    anthropic_error,
    chat_of_messages,
    message_events,
    message_of,
)
from serve_apps.gateway.calls.chat import chat_tokens
from serve_apps.gateway.http.answering import LongBodyRoute, ServiceDependency, chat_events
from serve_apps.gateway.http.chat_api import answer_chat
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import model_of
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError, invalid_body_error

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AnthropicRoute(LongBodyRoute):
    """Answers errors in Anthropic's form."""

    def get_route_handler(self) -> Handler:
        """Returns the handler of the route."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as fault:
                error = invalid_body_error(list(fault.errors()))
            except ApiError as fault:
                error = fault
            return JSONResponse(anthropic_error(error.body), status_code=error.status, headers=error.headers)

        return handle


router = APIRouter(route_class=AnthropicRoute)


def add_to(api: FastAPI, service: Service) -> None:
    """Adds the routes to a gateway."""
    if "messages" in service.config.extensions:
        load_converters()  # now: while it imports, a process answers nobody
    api.include_router(router)


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers with an agent or a model group, at once or as server-sent events; tools, forms and limits are those of a chat."""
    _check_on(service)
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    return await answer_chat(
        service,
        request,
        body,
        team=production.name,
        key=key,
        asked=lambda: chat_of_messages(body),
        kind="msg",
        events=lambda *stream: message_events(chat_events(*stream)),
        form=message_of,
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: ServiceDependency) -> dict[str, int]:
    """Returns the number of tokens of a message's prompt as an agent or a model group gets it.

    A prompt that does not fit the context is counted, too: callers ask so that they can shorten it. One that has more characters
    than could fit is refused untokenized, since counting is work.
    """
    _check_on(service)
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    # A place as any request takes: tokenizing is work.
    with await unless_gone(request, service.take_slot(production.name, None, key)) as team:
        group, agent = model_of(team, body.model)

        def count() -> int:
            _, tokens = chat_tokens(chat_of_messages(body), team, group, agent)
            return len(tokens)

        return {"input_tokens": await worked_on(body.num_characters, count)}


def _check_on(service: Service) -> None:
    if "messages" not in service.config.extensions:
        raise ApiError(
            404, "Anthropic's Messages API is off here: set gateway.extensions: [messages]", code="not_enabled"
        )
