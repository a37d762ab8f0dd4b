"""http_api: the gateway's HTTP surface. FastAPI routes around `Service`, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_apps.gateway.admin_api import admin_routes
from serve_apps.gateway.api_keys import ApiKey
from serve_apps.gateway.chat import Chat, answer_body, chunks, complete, prepare, usage
from serve_apps.gateway.chat_trace import is_trainable, trace_of
from serve_apps.gateway.dashboard import dashboard_routes
from serve_apps.gateway.episode_api import gateway_episode_routes
from serve_apps.gateway.episodes import GatewayEpisodes
from serve_apps.gateway.figures import chat_figures, run_figures
from serve_apps.gateway.service import Held, Service
from serve_apps.gateway.teams import find, model_of
from serve_apps.gateway.workflow_runs import Run, episode_spec, run_workflow, stream_workflow
from serve_apps.openai_api.http_errors import STREAM, add_errors, unless_gone
from serve_apps.openai_api.protocol import ApiError, ChatRequest, FeedbackRequest, RunRequest

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for code, text in {
        400: "the request does not fit",
        401: "no key, or none that is known",
        403: "the key may not do this",
        404: "no such model, team, trace or episode",
        409: "not while calls are on their way",
        410: "the episode has ended, or its team is not loaded any more",
        413: "the body is too large",
        429: "too many requests: come again",
        503: "not ready, or overloaded",
        504: "not done in time",
    }.items()
}


def build_api(service: Service, episodes: GatewayEpisodes) -> FastAPI:
    """The application; `service` may become ready later."""
    api = FastAPI(title="Troupe gateway", version="1", docs_url=None, redoc_url=None, responses=PROBLEMS)

    @api.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Every agent and model group of every team in service."""
        service.caller(request, "call")
        data = [
            {"id": name, "object": "model", "created": int(service.started_at), "owned_by": production.name}
            for production in service.teams.values()
            for name in sorted(production.champion.models)
        ]
        return {"object": "list", "data": data}

    @api.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> dict[str, Any]:
        """One of them."""
        service.caller(request, "call")
        production = find(service.teams, model)
        return {"id": model, "object": "model", "created": int(service.started_at), "owned_by": production.name}

    @api.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """A chat with an agent or a model group, answered at once or as server-sent events."""
        key = service.caller(request, "call", counts=True)
        production = find(service.teams, body.model)
        held = await service.take(production.name, body.user)
        with _released_unless_streamed(service, held) as stream:
            chat = prepare(body, held.team, *model_of(held.team, body.model))
            headers = held.team.headers(chat.id)
            if body.stream:
                ended = partial(_chat_ended, service, held, key, chat)
                return stream(_chat_events(service, held, chunks(chat, service.streams)), headers, ended)
            answer = await unless_gone(request, service.in_time(complete(chat, service.streams)))
        _chat_ended(service, held, key, chat)
        return JSONResponse(answer, headers=headers)

    @api.post("/v1/workflows/{team}/runs")
    async def workflow_runs(team: str, body: RunRequest, request: Request) -> Response:
        """The whole workflow on one task: its answer, or an event per turn."""
        key = service.caller(request, "call", counts=True)
        held = await service.take(team, body.user)
        ended = partial(_run_ended, service, held, key, body)
        with _released_unless_streamed(service, held) as stream:
            spec = episode_spec(held.team, body)
            headers = held.team.headers(spec.episode_id)
            if body.stream:
                events = _events(service, held, stream_workflow(service, held.team, spec, ended=ended))
                return stream(events, headers, lambda: None)
            run = await unless_gone(request, service.in_time(run_workflow(service, held.team, spec)))
        ended(run)
        return JSONResponse(run.answer, headers=headers)

    api.include_router(gateway_episode_routes(service, episodes))

    @api.post("/v1/traces/{trace_id}/feedback")
    async def feedback(trace_id: str, body: FeedbackRequest, request: Request) -> dict[str, Any]:
        """What the caller thinks of an answer that it got; its newest word counts. `trace_id` is the answer's id."""
        key = service.caller(request, "feedback", counts=True)
        given = await service.judge(trace_id, body, key)
        return {"object": "trace.feedback", "trace_id": trace_id, "created": int(given.at), **body.model_dump()}

    @api.get("/health")
    async def health() -> dict[str, str]:
        """That this process answers."""
        return {"status": "ok", "gateway": service.name}

    @api.get("/ready")
    async def ready() -> Response:
        """Whether a team is in service; 503 where none is."""
        teams = {name: p.champion.version for name, p in service.teams.items()}
        return JSONResponse(
            {"status": "ready" if teams else "no team is in service", "teams": teams}, status_code=200 if teams else 503
        )

    @api.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """For Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    api.include_router(admin_routes(service))
    api.include_router(dashboard_routes())
    add_errors(api)
    api.add_middleware(_Limits, service=service)
    return api


class _Limits:
    """Refuses too large a body before it is read; counts every request, with the seconds to its first byte."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, has_begun = time.perf_counter(), False

        def count(status: int) -> None:
            path = getattr(scope.get("route"), "path", "unknown")
            self._service.metrics.request(path, status, time.perf_counter() - began)

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                count(message["status"])
            await send(message)

        error = self._refusal(scope)
        try:
            if error is None:
                await self._app(scope, receive, counted)
            else:
                await JSONResponse(error.body, status_code=error.status)(scope, receive, counted)
        finally:
            if not has_begun:  # what nobody has foreseen is answered outside of this, with 500
                count(500)

    def _refusal(self, scope: Scope) -> ApiError | None:
        size, limit = Headers(scope=scope).get("content-length"), self._service.config.max_body_bytes
        if scope["method"] in ("POST", "PUT", "PATCH") and (size is None or not size.isdigit()):
            return ApiError(411, "send Content-Length: bodies of unknown size are not taken", code="length_required")
        if size is not None and size.isdigit() and int(size) > limit:
            return ApiError(413, f"the body has {size} bytes, at most {limit} are taken", code="body_too_large")
        return None


class _HeldStream(StreamingResponse):
    """Server-sent events that hold a place until they end, however they end."""

    def __init__(
        self, held: Held, events: AsyncGenerator[str], headers: dict[str, str], ended: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type=STREAM, headers={"Cache-Control": "no-cache", **headers})
        self._held, self._events, self._ended = held, events, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._held.release()
            self._ended()


@contextmanager
def _released_unless_streamed(
    service: Service, held: Held
) -> Iterator[Callable[[AsyncGenerator[str], dict[str, str], Callable[[], None]], Response]]:
    """What makes a stream of events; the place is given back at the end, the stream's own or this block's.

    An error that is the gateway's, not the caller's, counts as a failure of the team.
    """
    streams: list[_HeldStream] = []

    def stream(events: AsyncGenerator[str], headers: dict[str, str], ended: Callable[[], None]) -> Response:
        streams.append(_HeldStream(held, events, headers, ended))
        return streams[0]

    try:
        with service.failures_of(held.team):
            yield stream
    finally:
        if not streams:
            held.release()


def _chat_ended(service: Service, held: Held, key: ApiKey, chat: Chat) -> None:
    """An answer, or a stream that has ended, whole or not: counts it, keeps it where that is allowed, has it shadowed."""
    choices = list(chat.choices.values())
    if len(choices) < chat.request.n or not all(choice.finish_reason for choice in choices):
        service.answered(held, key, usage(chat)["completion_tokens"], None)
        return
    service.answered(held, key, usage(chat)["completion_tokens"], chat_figures(answer_body(chat)))
    is_kept, task_id = service.capture.wants(chat.request.store), f"request-{chat.id}"
    if is_kept:
        trace = trace_of(chat, task_id=task_id, seconds=held.seconds)
        service.keep(trace, team=chat.team, key=key, is_trainable=is_trainable(chat))
    service.shadow(held, chat.request, key=key, task_id=task_id, is_kept=is_kept)


def _run_ended(service: Service, held: Held, key: ApiKey, body: RunRequest, run: Run) -> None:
    service.answered(held, key, run.answer["usage"]["completion_tokens"], run_figures(run.answer))
    is_kept = service.capture.wants(body.store)
    if is_kept:
        service.keep(run.trace, team=run.team, key=key, is_trainable=True)
    service.shadow(held, body, key=key, task_id=run.trace.task.task_id, is_kept=is_kept)


async def _chat_events(service: Service, held: Held, answer: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """Data lines and, where all went well, `[DONE]`."""
    is_done = True
    async with aclosing(_events(service, held, answer)) as events:
        async for event in events:
            is_done = not event.startswith('data: {"error"')
            yield event
    if is_done:
        yield "data: [DONE]\n\n"


async def _events(service: Service, held: Held, answer: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """What is said as server-sent events; an error is the last of them."""
    try:
        with service.failures_of(held.team):
            async with aclosing(answer) as parts, asyncio.timeout(service.config.request_timeout_s):
                async for part in parts:
                    yield f"data: {json.dumps(part)}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    except TimeoutError:
        yield f"data: {json.dumps(service.too_late.body)}\n\n"
