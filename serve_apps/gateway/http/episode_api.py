"""episode_api: `/v1/episodes` of the gateway. An episode lives in one replica; the other replicas forward its calls to it.

POST /v1/episodes ──> ep-REPLICA-... , open on this replica
call of ep-REPLICA-... ── of this replica? ──> answered here
                          └─ no ──> forwarding: the own address of REPLICA
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serve_apps.gateway.calls.episodes import GatewayEpisodes
from serve_apps.gateway.http.api_state import EpisodesDependency, ServiceDependency
from serve_apps.gateway.http.forwarding import forwarding_route
from serve_apps.gateway.http.long_bodies import LongBodyRoute
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.protocol import EpisodeRequest
from serve_apps.program.routes import episode_routes

router = APIRouter(route_class=LongBodyRoute)


def episode_router(service: Service, episodes: GatewayEpisodes) -> APIRouter:
    """Returns the routes that open episodes and answer the calls of all that are open on any replica."""
    routes = APIRouter()
    routes.include_router(router)
    routes.include_router(episode_routes(episodes, route_class=forwarding_route(service)))
    return routes


@router.post("/v1/episodes")
async def open_episode(
    body: EpisodeRequest, request: Request, service: ServiceDependency, episodes: EpisodesDependency
) -> Response:
    """Begins an episode that the caller's program runs; its `base_url` is an OpenAI API of its own."""
    production, key = service.authorize(request, "call", team=body.team, counts=True)
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
