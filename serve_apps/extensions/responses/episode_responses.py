"""episode_responses: the Responses API of the episodes that programs play. It imports nothing of the gateway: workers play episodes, too."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_apps.extensions.responses.kept_responses import KeptResponses
from serve_apps.extensions.responses.response_events import named_events, response_events
from serve_apps.extensions.responses.responses import ResponsesRequest, response_of
from serve_apps.openai_api.http_errors import STREAM, unless_gone
from serve_apps.program.episode import ProgramEpisode
from serve_apps.program.routes import Episodes, as_chunks

MAX_CHARACTERS = 1_000_000
"""Characters of the kept responses of an agent of an episode together; the oldest go first."""


def add_to(routes: APIRouter, episodes: Episodes) -> None:
    """Adds the routes to the episodes of programs."""
    responses_of: WeakKeyDictionary[ProgramEpisode, KeptResponses] = WeakKeyDictionary()

    async def respond(episode: ProgramEpisode, agent: str, body: ResponsesRequest, request: Request) -> Response:
        earlier = responses_of.setdefault(episode, KeptResponses(max_characters=MAX_CHARACTERS))
        asked, keep = earlier.conversation(body, agent)
        reply = await unless_gone(request, episodes.chat(episode, agent, asked))
        response = keep(response_of(body, reply))
        if not body.stream:
            return JSONResponse(response, headers=episode.headers)
        events = named_events(response_events(body, as_chunks(reply, with_usage=True)))
        return StreamingResponse(events, media_type=STREAM, headers=episode.headers)

    @routes.post("/responses")
    async def episode_response_by_model(episode_id: str, body: ResponsesRequest, request: Request) -> Response:
        """Calls the agent that `model` names, in the form of the Responses API."""
        episode = episodes.find(episode_id, request)
        return await respond(episode, episode.agent_of(None, body.model), body, request)

    @routes.post("/agents/{agent}/responses")
    async def episode_response_by_path(
        episode_id: str, agent: str, body: ResponsesRequest, request: Request
    ) -> Response:
        """Calls the agent in the path, in the form of the Responses API."""
        episode = episodes.find(episode_id, request)
        return await respond(episode, episode.agent_of(agent, body.model), body, request)
