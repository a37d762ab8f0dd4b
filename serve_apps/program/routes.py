"""routes: HTTP requests below /v1/episodes -> an OpenAI API per episode, in a collector's process and in the gateway.

/v1/episodes/ID/chat/completions                 the agent that `model` names
/v1/episodes/ID/agents/AGENT/chat/completions    the agent in the path
/v1/episodes/ID/models, .../outcome              the agents of the episode; how it ended
and what extensions add
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from serve_apps.openai_api.answer_reader import REASONING_KEYS
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.http_errors import STREAM, unless_gone
from serve_apps.program.episode import PostedOutcome, ProgramEpisode
from stores.by_name import open_by_name
from stores.extensions import extensions


class Episodes(Protocol):
    """Finds the episodes that the routes lead to, and answers their calls."""

    def find(self, episode_id: str, request: Request) -> ProgramEpisode:
        """Returns an episode under way that this caller may see; ApiError where there is none."""
        ...

    async def chat(self, episode: ProgramEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        """Answers one call; raises ApiError."""
        ...

    async def outcome(self, episode: ProgramEpisode, posted: PostedOutcome) -> dict[str, Any]:
        """Takes a posted outcome and returns the body of the answer; raises ApiError."""
        ...


def episode_routes(episodes: Episodes, *, route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """Returns the routes below `/v1/episodes/{episode_id}`."""
    routes = APIRouter(prefix="/v1/episodes/{episode_id}", route_class=route_class)

    async def answered(episode: ProgramEpisode, agent: str, body: ChatRequest, request: Request) -> Response:
        answer = await unless_gone(request, episodes.chat(episode, agent, body))
        if not body.stream:
            return JSONResponse(answer, headers=episode.headers)
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(as_chunks(answer, with_usage=with_usage))
        return StreamingResponse(events, media_type=STREAM, headers=episode.headers)

    @routes.post("/chat/completions")
    async def episode_chat_by_model(episode_id: str, body: ChatRequest, request: Request) -> Response:
        """Calls the agent that `model` names; where there is one agent, every name means it."""
        episode = episodes.find(episode_id, request)
        return await answered(episode, episode.agent_of(None, body.model), body, request)

    @routes.post("/agents/{agent}/chat/completions")
    async def episode_chat_by_path(episode_id: str, agent: str, body: ChatRequest, request: Request) -> Response:
        """Calls the agent in the path."""
        episode = episodes.find(episode_id, request)
        return await answered(episode, episode.agent_of(agent, body.model), body, request)

    @routes.get("/models")
    async def episode_models(episode_id: str, request: Request) -> dict[str, Any]:
        """Lists the episode's agents."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "troupe"}
            for name in episodes.find(episode_id, request).agents
        ]
        return {"object": "list", "data": data}

    @routes.post("/outcome")
    async def episode_outcome(episode_id: str, body: PostedOutcome, request: Request) -> dict[str, Any]:
        """Takes how the episode ended, from the program or a grader."""
        return await episodes.outcome(episodes.find(episode_id, request), body)

    for extension in extensions():
        if extension.episode_routes:
            open_by_name(extension.episode_routes, place=f"extension {extension.name}")(routes, episodes)
    return routes


async def _events(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    async for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


async def as_chunks(body: Mapping[str, Any], *, with_usage: bool) -> AsyncGenerator[dict[str, Any]]:
    """Yields a whole answer as the chunks of `stream: true`: a turn is recorded first and streamed afterwards."""
    (choice,) = body["choices"]
    message = choice["message"]
    envelope = {k: v for k, v in body.items() if k not in ("choices", "usage", "object")}
    envelope["object"] = "chat.completion.chunk"
    thoughts = {key: message[key] for key in REASONING_KEYS if key in message}

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        about = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return {**envelope, "choices": [about]}

    yield chunk({"role": "assistant", **thoughts, "content": message["content"] or ""}, logprobs=choice["logprobs"])
    if calls := message.get("tool_calls"):
        yield chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    yield chunk({}, finish_reason=choice["finish_reason"])
    if with_usage:
        yield {**envelope, "choices": [], "usage": body["usage"]}
