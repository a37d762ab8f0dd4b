"""chat_api: `POST /v1/chat/completions`, at once or as a stream.

request ──> API key ──> slot and team ──> reply or events ──> counted ──> captured, if allowed ──> copied to the candidate
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.gateway.calls.chat import Chat, prepare_chat
from serve_apps.gateway.calls.chat_reply import complete_chat, reply_body, stream_chunks
from serve_apps.gateway.calls.chat_trace import is_trainable, trace_of
from serve_apps.gateway.http.api_state import ServiceDependency
from serve_apps.gateway.http.event_stream import chat_events, released_unless_streamed
from serve_apps.gateway.http.long_bodies import LongBodyRoute
from serve_apps.gateway.traffic.api_keys import ApiKey
from serve_apps.gateway.traffic.figures import chat_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.slots import Slot
from serve_apps.gateway.traffic.teams import model_of
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.http_errors import unless_gone

router = APIRouter(route_class=LongBodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers a chat with an agent or a model group, at once or as server-sent events."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    slot = await service.take_slot(production.name, body.user, key)
    with released_unless_streamed(service, slot) as start_stream:
        chat = await prepare_chat(body, slot.team, *model_of(slot.team, body.model))
        if body.stream:
            on_end = partial(chat_ended, service, slot, key, chat)
            events = chat_events(service, slot, stream_chunks(chat, service.streams))
            return start_stream(events, chat.headers, on_end)
        reply = await unless_gone(request, service.within_timeout(complete_chat(chat, service.streams)))
    chat_ended(service, slot, key, chat)
    return JSONResponse(reply, headers=chat.headers)


def chat_ended(service: Service, slot: Slot, key: ApiKey, chat: Chat) -> None:
    """Counts a chat that has ended, complete or not; a complete one may be captured and copied to the candidate."""
    if not chat.is_complete:
        service.count_answer(slot, key, chat.usage["completion_tokens"], None)
        return
    service.count_answer(
        slot, key, chat.usage["completion_tokens"], chat_figures(reply_body(chat, with_logprobs=False))
    )
    is_kept, task_id = service.capture.should_keep(chat.team, chat.request.store), f"request-{chat.id}"
    if is_kept:
        trace = trace_of(chat, task_id=task_id, seconds=slot.seconds)
        service.keep_trace(trace, team=chat.team, key=key, is_trainable=is_trainable(chat))
    service.send_shadow(slot, chat.request, key=key, task_id=task_id, is_kept=is_kept)
