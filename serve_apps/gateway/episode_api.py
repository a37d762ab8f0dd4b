"""episode_api: `/v1/episodes` of the gateway. An episode lives in one replica; the others pass its calls on to it.

POST /v1/episodes ──> ep-REPLICA-... , open here
call of ep-REPLICA-... ── ours? ──> answered here
                          └─ no ──> REPLICA's own address, byte by byte
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from serve_apps.gateway.episodes import GatewayEpisodes
from serve_apps.gateway.peer_replicas import Addresses
from serve_apps.gateway.service import Service
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError, EpisodeRequest
from serve_apps.program.routes import episode_routes

PASSED_ON = "x-troupe-passed-on"
"""Header of a call that has come from another replica: it is not passed on again."""
KEPT_HEADERS = ("content-type", "cache-control", "retry-after", "x-request-id", "x-troupe-team")


def gateway_episode_routes(service: Service, episodes: GatewayEpisodes) -> APIRouter:
    """Opens episodes, and answers the calls of all that are open on any replica."""
    routes = APIRouter()

    @routes.post("/v1/episodes")
    async def open_episode(body: EpisodeRequest, request: Request) -> Response:
        """Begins an episode that the caller's program plays: `base_url` is an OpenAI API of its own."""
        key = service.caller(request, "call", counts=True)
        episode = episodes.open(body, key)
        url = f"/v1/episodes/{episode.id}"
        about = {
            "id": episode.id,
            "object": "episode",
            "base_url": url,
            "agents": {name: f"{url}/agents/{name}" for name in episode.agents},
            "expires_at": int(time.time() + episode.idle_left_s),
            "troupe": {**episode.team.about, "arm": episode.team.arm},
        }
        return JSONResponse(about, headers=episode.headers)

    routes.include_router(episode_routes(episodes, route_class=_passed_on(service)))
    return routes


def _passed_on(service: Service) -> type[APIRoute]:
    """Routes that hand the calls of another replica's episodes over to it."""
    addresses = Addresses(service.siblings)
    http = httpx.AsyncClient(
        timeout=httpx.Timeout(10, read=service.config.request_timeout_s + 10),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )

    class PassedOn(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            own = super().get_route_handler()

            async def handle(request: Request) -> Response:
                replica = _replica_of(request.path_params["episode_id"])
                if replica in ("", service.replica) or PASSED_ON in request.headers:
                    return await own(request)
                service.caller(request, "call")  # who has no key has no reason to look for replicas
                address = await addresses.of(replica)
                if address is None:
                    return await own(request)  # which knows no such episode
                try:
                    return await _asked(http, address, request)
                except httpx.TransportError:
                    addresses.forget(replica)
                    raise ApiError(
                        503, "the gateway replica of this episode does not answer", code="replica_gone", retry_after_s=2
                    ) from None

            return handle

    return PassedOn


def _replica_of(episode_id: str) -> str:
    """By name; empty where the id is none of the gateway's."""
    parts = episode_id.split("-")
    return parts[1] if len(parts) == 3 and parts[0] == "ep" else ""


async def _asked(http: httpx.AsyncClient, address: str, request: Request) -> Response:
    """The other replica's answer; it learns, too, when the client goes away."""
    kept = ("authorization", "content-type", "accept")
    headers = {name: value for name in kept if (value := request.headers.get(name))} | {PASSED_ON: "1"}
    url = httpx.URL(address).copy_with(raw_path=request.scope.get("raw_path") or request.url.path.encode())
    sent = http.build_request(request.method, url, headers=headers, content=await request.body())
    answer = await unless_gone(request, http.send(sent, stream=True))
    told = {name: value for name in KEPT_HEADERS if (value := answer.headers.get(name))}
    return StreamingResponse(_bytes_of(answer), status_code=answer.status_code, headers=told)


async def _bytes_of(answer: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
