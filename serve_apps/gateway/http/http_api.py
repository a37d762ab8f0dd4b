"""http_api: the FastAPI application of one gateway replica. Errors have OpenAI's form.

request ──> RequestLimits ──> chat_api | workflow_api | the small routes here, and those of extensions ──> Service
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from serve_apps.gateway.http import chat_api, workflow_api
from serve_apps.gateway.http.answering import LongBodyRoute, ServiceDependency
from serve_apps.gateway.http.request_limits import PagesOfTeams, RequestLimits
from serve_apps.gateway.traffic.callers import NO_TEAM, SCOPES
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import Production
from serve_apps.openai_api.http_errors import add_errors
from serve_apps.openai_api.protocol import ApiError, FeedbackRequest
from stores.by_name import open_by_name
from stores.extensions import extensions

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for code, text in {
        400: "The request is not valid.",
        401: "There is no API key, or it is unknown.",
        403: "The API key may not do this.",
        404: "There is no such model, team, trace or episode.",
        408: "The body did not come in time.",
        409: "Calls of the episode are in flight.",
        410: "The episode has ended, or its team is not loaded any more.",
        413: "The body is too large.",
        415: "The body is packed, which is not accepted.",
        429: "There are too many requests: try again later.",
        503: "The gateway is not ready, or overloaded.",
        504: "The request was not answered in time.",
    }.items()
}

router = APIRouter(route_class=LongBodyRoute)


def build_api(service: Service) -> FastAPI:
    """Builds the application; teams may be added to `service` later."""
    lifespans: list[AbstractAsyncContextManager[None]] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for each in lifespans:
                await stack.enter_async_context(each)
            yield

    api = FastAPI(
        title="Troupe gateway",
        version="1",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
        lifespan=lifespan,
    )
    api.state.service = service
    for routes in (router, chat_api.router, workflow_api.router):
        api.include_router(routes)
    for extension in extensions():
        if extension.routes:
            added = open_by_name(extension.routes, place=f"extension {extension.name}")(api, service)
            lifespans += [] if added is None else [added]
    api.add_middleware(
        RequestLimits, service=service
    )  # around what extensions add: requests without a key make no spans
    api.add_middleware(PagesOfTeams, callers=service.callers)
    add_errors(api)  # last, so that the refusals of the layers above are named as well
    return api


@router.get("/openapi.json", include_in_schema=False)
async def get_document(request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Returns the OpenAPI document of this API."""
    service.keys_of(request, *SCOPES)
    document: dict[str, Any] = request.app.openapi()
    return document


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Lists the models: every agent and every model group of every team that the key opens, also under names without a slash."""
    reached = [service.teams[name] for name in service.keys_of(request, "call")]
    data = [_model(service, production, name) for production in reached for name in sorted(production.champion.models)]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Returns one model by its id, `TEAM/AGENT` or `TEAM/group/GROUP`."""
    production, _ = service.authorize(request, "call", model=model)
    return _model(service, production, model)


def _model(service: Service, production: Production, name: str) -> dict[str, Any]:
    group, _ = production.champion.models[name]
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_at),
        "owned_by": production.name,
        "max_model_len": production.champion.acting.max_model_len[group],
    }


@router.post("/v1/traces/{trace_id}/feedback")
async def give_feedback(
    trace_id: str, body: FeedbackRequest, request: Request, service: ServiceDependency
) -> dict[str, Any]:
    """Stores feedback on an answer that the caller got; the newest feedback counts. `trace_id` is the id of the answer."""
    keys = service.keys_of(request, "feedback")
    service.count_request(request, next(iter(keys.values())))
    feedback = await service.capture.store_feedback(trace_id, body, keys)
    return {"object": "trace.feedback", "trace_id": trace_id, "created": int(feedback.at), **body.model_dump()}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def get_health(service: ServiceDependency) -> dict[str, str]:
    """Confirms that this process answers. Needs no key."""
    return {"status": "ok", "gateway": service.name}


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Names the version of Troupe. Needs no key."""
    return {"version": version("troupe-rl")}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def get_readiness(request: Request, service: ServiceDependency) -> Response:
    """Reports whether a team is deployed; the status is 503 where none is. Needs no key, and names the teams to those who have one."""
    body: dict[str, Any] = {"status": "ready" if service.teams else NO_TEAM}
    with suppress(ApiError):
        body["teams"] = {name: service.teams[name].champion.version for name in service.keys_of(request, *SCOPES)}
    return JSONResponse(body, status_code=200 if service.teams else 503)


@router.get("/metrics")
async def get_metrics(request: Request, service: ServiceDependency) -> PlainTextResponse:
    """Returns the metrics of this replica in Prometheus' text format. They name the key's teams, and their keys: it needs the scope `metrics`."""
    teams = service.keys_of(request, "metrics")
    return PlainTextResponse(service.metrics.text(teams), media_type="text/plain; version=0.0.4")
