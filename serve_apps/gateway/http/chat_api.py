"""chat_api: `POST /v1/chat/completions`, and what else answers as a chat does, in another form.

request ──> API key ──> slot and team ──> reply or events ──> counted ──> captured, if allowed ──> copied to the candidate
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serve_apps.chat.long_texts import worked_on
from serve_apps.gateway.calls.chat import (
    Chat,
    complete_chat,
    is_trainable,
    prepare_chat,
    reply_body,
    stream_chunks,
    trace_of,
)
from serve_apps.gateway.http.answering import (
    Events,
    LongBodyRoute,
    Parts,
    ServiceDependency,
    Work,
    answered,
    chat_events,
)
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.callers import ApiKey
from serve_apps.gateway.traffic.figures import chat_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import model_of
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.http_errors import unless_gone

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers a chat with an agent or a model group, at once or as server-sent events."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    return await answer_chat(service, request, body, team=production.name, key=key, asked=body)


async def answer_chat(
    service: Service,
    request: Request,
    body: Any,
    *,
    team: str,
    key: ApiKey,
    asked: ChatRequest | Callable[[], ChatRequest],
    kind: str = "chatcmpl",
    events: Callable[[Service, Slot, Parts], Events] = chat_events,
    form: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply,
) -> Response:
    """Answers a request as a chat, in the form of an API.

    Args:
        body: as it was sent; it has `model`, `user` and `stream`.
        asked: the chat that it asks for, or what makes one of it.
        kind: what the id of the reply begins with.
        events: the chunks of `stream: true` -> events.
        form: a reply in OpenAI's form -> that of the API.
    """
    slot = await unless_gone(request, service.take_slot(team, body.user, key))

    async def prepare() -> Work:
        of_chat = await worked_on(body.num_characters, asked) if callable(asked) else asked
        chat = await prepare_chat(of_chat, slot.team, *model_of(slot.team, body.model), kind=kind)

        async def reply() -> dict[str, Any]:
            return form(await complete_chat(chat, service.streams))

        return Work(
            headers=chat.headers,
            reply=reply,
            events=lambda: events(service, slot, stream_chunks(chat, service.streams)),
            on_end=partial(_ended, service, slot, key, chat),
        )

    return await answered(service, request, slot, prepare, is_streamed=body.stream)


def _ended(service: Service, slot: Slot, key: ApiKey, chat: Chat) -> None:
    """Counts a chat that has ended, complete or not; a complete one may be captured and copied to the candidate."""
    figures = chat_figures(reply_body(chat, with_logprobs=False)) if chat.is_complete else None
    service.count_answer(slot, key, chat.usage["completion_tokens"], figures)
    if not chat.is_complete:
        return
    is_kept, task_id = service.capture.should_keep(chat.team, chat.request.store), f"request-{chat.id}"
    if is_kept:
        trace = trace_of(chat, task_id=task_id, seconds=slot.seconds)
        service.capture.keep_trace(trace, team=chat.team, key=key, is_trainable=is_trainable(chat))
    service.send_shadow(slot, chat.request, key=key, figures=figures, task_id=task_id, is_kept=is_kept)
