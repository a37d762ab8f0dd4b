"""episode_api: `/v1/episodes` of the gateway. An episode lives in one replica; the other replicas forward its calls to it.

POST /v1/episodes ──> ep-REPLICA-... , open on this replica
call of ep-REPLICA-... ── of this replica? ──> answered here
                          └─ no ──> forwarding: the own address of REPLICA
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_apps.extensions.episodes.episodes import GatewayEpisodes
from serve_apps.gateway.http.answering import LongBodyRoute, ServiceDependency
from serve_apps.gateway.traffic.admission import RATE_HEADERS
from serve_apps.gateway.traffic.peer_replicas import PeerReplicas
from serve_apps.gateway.traffic.service import Service
from serve_apps.http.peer import async_client
from serve_apps.openai_api.http_errors import unless_gone
from serve_apps.openai_api.protocol import ApiError, EpisodeRequest
from serve_apps.program.routes import episode_routes
from serve_apps.spans import process_spans

FORWARDED = "x-troupe-forwarded"
"""Header of a call that has come from another replica: it is not forwarded again."""
REQUEST_HEADERS = ("authorization", "x-api-key", "host", "origin", "content-type", "accept")
"""Among them all that a team's door looks at: which team an episode is of is known on its replica only."""
RESPONSE_HEADERS = (
    "content-type",
    "cache-control",
    "retry-after",
    "x-request-id",
    "x-troupe-team",
    "x-troupe-ignored",
    *RATE_HEADERS,
)

LOOKUP_TIMEOUT_S = 1.0
"""How long an unknown replica is looked for: while its route changes it is in no list (serve_apps/policy/replicas.py)."""
LOOKUP_INTERVAL_S = 0.1
"""Least time between two lookups, whoever asks for whichever replica."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

router = APIRouter(route_class=LongBodyRoute)


def add_to(api: FastAPI, service: Service) -> AbstractAsyncContextManager[None]:
    """Adds the routes that open episodes and answer the calls of all that are open on any replica; at its end they are closed."""
    episodes = api.state.episodes = GatewayEpisodes(service)
    api.include_router(router)
    forwarding = Forwarding(service)

    class ForwardingRoute(LongBodyRoute):
        def get_route_handler(self) -> Handler:
            answer_here = super().get_route_handler()

            async def handle(request: Request) -> Response:
                return await forwarding.handle(request, answer_here)

            return handle

    api.include_router(episode_routes(episodes, route_class=ForwardingRoute))
    return _open(episodes)


@asynccontextmanager
async def _open(episodes: GatewayEpisodes) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await episodes.close()


@router.post("/v1/episodes")
async def open_episode(body: EpisodeRequest, request: Request, service: ServiceDependency) -> Response:
    """Begins an episode that the caller's program runs; its `base_url` is an OpenAI API of its own."""
    production, key = service.authorize(request, "call", team=body.team, counts=True)
    episodes: GatewayEpisodes = request.app.state.episodes
    episode = episodes.open_episode(production, body, key)
    url = f"/v1/episodes/{episode.id}"
    reply = {
        "id": episode.id,
        "object": "episode",
        "base_url": url,
        "agents": {name: f"{url}/agents/{name}" for name in episode.agents},
        "expires_at": int(time.time() + episode.idle_left_s),
        "troupe": episode.team.reply_fields,
    }
    return JSONResponse(reply, headers=episode.headers)


class PeerAddresses:
    """Finds the own address of each replica and remembers it."""

    def __init__(self, peers: PeerReplicas | None) -> None:
        self._peers = peers
        self._known: dict[str, str] = {}
        self._looked_up_at = -LOOKUP_INTERVAL_S
        self._lookup = asyncio.Lock()

    async def find(self, replica: str) -> str | None:
        """Returns `http://HOST:PORT` of a replica by its name; None where no such replica appears within `LOOKUP_TIMEOUT_S`."""
        deadline = time.monotonic() + LOOKUP_TIMEOUT_S
        while replica not in self._known and time.monotonic() < deadline:
            await self._look_up()
        return self._known.get(replica)

    async def _look_up(self) -> None:
        """Asks once for all who wait, or waits until the next lookup is due.

        Known addresses stay known, also those of replicas that are not in the list now.
        """
        async with self._lookup:
            if time.monotonic() > self._looked_up_at + LOOKUP_INTERVAL_S:
                statuses = [] if self._peers is None else await self._peers.statuses()
                self._known |= {status["replica"]: status["address"] for status in statuses}
                self._looked_up_at = time.monotonic()
                return
        await asyncio.sleep(LOOKUP_INTERVAL_S)

    def forget(self, replica: str) -> None:
        """Drops an address at which the replica does not answer."""
        self._known.pop(replica, None)


class Forwarding:
    """Decides where a call is answered, and forwards it where that is another replica."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._addresses = PeerAddresses(service.peers)
        timeout = httpx2.Timeout(10, read=service.config.request_timeout_s + 10)
        self._http = async_client([], timeout=timeout, max_bytes=None, is_ours=True)

    async def handle(self, request: Request, answer_here: Handler) -> Response:
        """Answers a call here or forwards it; ApiError 503 where the episode's replica does not answer."""
        replica = replica_of(request.path_params["episode_id"])
        if replica in ("", self._service.replica) or FORWARDED in request.headers:
            return await answer_here(request)
        self._service.keys_of(request, "call", "admin")  # before the lookup, which callers without a key must not cause
        address = await self._addresses.find(replica)
        if address is None:
            return await answer_here(request)  # which reports that there is no such episode
        try:
            return await self._forward(request, address)
        except httpx2.TransportError:
            self._addresses.forget(replica)
            raise ApiError(
                503, "the gateway replica of this episode does not answer", code="replica_gone", retry_after_s=2
            ) from None

    async def _forward(self, request: Request, address: str) -> Response:
        """Returns the other replica's response. Its connection is closed when the caller leaves, so that it stops too."""
        headers = {name: value for name in REQUEST_HEADERS if (value := request.headers.get(name))} | {
            FORWARDED: "1",
            **process_spans().headers(),
        }
        url = httpx2.URL(address).copy_with(raw_path=request.scope.get("raw_path") or request.url.path.encode())
        forwarded = self._http.build_request(request.method, url, headers=headers, content=await request.body())
        response = await unless_gone(request, self._http.send(forwarded, stream=True))
        own_headers = {name: value for name in RESPONSE_HEADERS if (value := response.headers.get(name))}
        return StreamingResponse(_bytes_of(response), status_code=response.status_code, headers=own_headers)


def replica_of(episode_id: str) -> str:
    """Returns the name of the replica in an episode's id; empty where the id is not one of the gateway's."""
    parts = episode_id.split("-")
    return parts[1] if len(parts) == 3 and parts[0] == "ep" else ""


async def _bytes_of(response: httpx2.Response) -> AsyncGenerator[bytes]:
    try:
        async for part in response.aiter_raw():
            yield part
    finally:
        await response.aclose()
