"""routes: HTTP requests below /v1/episodes -> an OpenAI API per episode, in a collector's process and in the gateway.

/v1/episodes/ID/chat/completions                 the agent that `model` names
/v1/episodes/ID/agents/AGENT/chat/completions    the agent in the path
/v1/episodes/ID/[agents/AGENT/]responses         the same in the form of the Responses API
/v1/episodes/ID/models, .../outcome              the agents of the episode; how it ended
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
from serve_apps.openai_api.response_events import event_text, response_events
from serve_apps.openai_api.responses import ResponsesRequest, chat_of, response_of
from serve_apps.program.episode import PostedOutcome, ProgramEpisode


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
        events = _events(_as_chunks(answer, with_usage=with_usage))
        return StreamingResponse(events, media_type=STREAM, headers=episode.headers)

    async def responded(episode: ProgramEpisode, agent: str, body: ResponsesRequest, request: Request) -> Response:
        earlier = episode.responses.items(body.previous_response_id, agent)
        asked = chat_of(body, earlier)
        reply = await unless_gone(request, episodes.chat(episode, agent, asked))
        response = response_of(body, reply)
        if body.store is not False:
            episode.responses.add(response["id"], agent, [*earlier, *body.items, *response["output"]])
        if not body.stream:
            return JSONResponse(response, headers=episode.headers)
        events = response_events(body, _each(_as_chunks(reply, with_usage=True)))
        return StreamingResponse(_named(events), media_type=STREAM, headers=episode.headers)

    @routes.post("/responses")
    async def episode_response_by_model(episode_id: str, body: ResponsesRequest, request: Request) -> Response:
        """Calls the agent that `model` names, in the form of the Responses API."""
        episode = episodes.find(episode_id, request)
        return await responded(episode, episode.agent_of(None, body.model), body, request)

    @routes.post("/agents/{agent}/responses")
    async def episode_response_by_path(
        episode_id: str, agent: str, body: ResponsesRequest, request: Request
    ) -> Response:
        """Calls the agent in the path, in the form of the Responses API."""
        episode = episodes.find(episode_id, request)
        return await responded(episode, episode.agent_of(agent, body.model), body, request)

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

    return routes


async def _events(chunks: list[dict[str, Any]]) -> AsyncGenerator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


async def _each(chunks: list[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    for chunk in chunks:
        yield chunk


async def _named(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    async for event in events:
        yield event_text(event)


def _as_chunks(body: Mapping[str, Any], *, with_usage: bool) -> list[dict[str, Any]]:
    """Returns a whole answer as the chunks of `stream: true`: a turn is recorded first and streamed afterwards."""
    (choice,) = body["choices"]
    message = choice["message"]
    envelope = {k: v for k, v in body.items() if k not in ("choices", "usage", "object")}
    envelope["object"] = "chat.completion.chunk"
    thoughts = {key: message[key] for key in REASONING_KEYS if key in message}
    parts: list[dict[str, Any]] = [{"role": "assistant", **thoughts, "content": message["content"] or ""}]
    if calls := message.get("tool_calls"):
        parts.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    chunks = [
        {**envelope, "choices": [{"index": 0, "delta": part, "finish_reason": None, "logprobs": None}]}
        for part in parts
    ]
    chunks[0]["choices"][0]["logprobs"] = choice["logprobs"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    chunks.append({**envelope, "choices": [last]})
    if with_usage:
        chunks.append({**envelope, "choices": [], "usage": body["usage"]})
    return chunks
