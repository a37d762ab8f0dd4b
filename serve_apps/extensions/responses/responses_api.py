"""responses_api: `POST /v1/responses` of the gateway and of a program's episode: a chat in the form of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_apps.extensions.responses.response_events import response_events
from serve_apps.extensions.responses.responses import Item, ResponsesRequest, chat_of, response_of
from serve_apps.gateway.http.answering import Events, LongBodyRoute, Parts, ServiceDependency, or_error
from serve_apps.gateway.http.chat_api import answer_chat
from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.http_errors import STREAM, unless_gone
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError
from serve_apps.program.episode import ProgramEpisode
from serve_apps.program.routes import Episodes, as_chunks

MAX_CHARACTERS = 8_000_000
"""Characters of the kept responses of one owner together; the oldest go first."""
EPISODE_CHARACTERS = 1_000_000
"""The same for an agent of an episode."""
ITEM_CHARACTERS = 500
"""What an item takes beside its text."""


class KeptResponses:
    """What was said up to each response, by its owner (a key, an agent) and its id. A later request may continue it."""

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._items: dict[Hashable, OrderedDict[str, tuple[Sequence[Item], int]]] = {}

    def add(self, response_id: str, owner: Hashable, items: Sequence[Item]) -> None:
        """Keeps all items up to a response, its own included."""
        of_owner = self._items.setdefault(owner, OrderedDict())
        of_owner[response_id] = items, len(json.dumps(items)) + ITEM_CHARACTERS * len(items)
        while sum(size for _, size in of_owner.values()) > self._max_characters:
            of_owner.popitem(last=False)

    def items(self, response_id: str | None, owner: Hashable) -> Sequence[Item]:
        """Returns the items up to a response of this owner; none for None, ApiError 404 where they are not kept."""
        if response_id is None:
            return ()
        of_owner = self._items.get(owner)
        if of_owner is None or response_id not in of_owner:
            raise ApiError(
                404,
                f"response {response_id[:MAX_ECHO]!r} is not kept here: it was not stored, is too old, or another gateway replica "
                "gave it; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        items, _ = of_owner[response_id]
        return items

    def conversation(
        self, body: ResponsesRequest, owner: Hashable
    ) -> tuple[ChatRequest, Callable[[dict[str, Any]], dict[str, Any]]]:
        """Returns the chat that a request asks for, and what keeps its response and returns it; ApiError 400 or 404."""
        earlier = self.items(body.previous_response_id, owner)

        def keep(response: dict[str, Any]) -> dict[str, Any]:
            if body.store is not False:
                self.add(response["id"], owner, [*earlier, *body.items, *response["output"]])
            return response

        return chat_of(body, earlier), keep


router = APIRouter(route_class=LongBodyRoute)


def add_to(api: FastAPI, service: Service) -> None:
    """Adds the route to a gateway."""
    api.state.kept_responses = KeptResponses()
    api.include_router(router)


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, service: ServiceDependency) -> Response:
    """Answers with an agent or a model group, at once or as server-sent events; tools, forms and limits are those of a chat."""
    production, key = service.authorize(request, "call", model=body.model, counts=True)
    kept: KeptResponses = request.app.state.kept_responses
    asked, keep = kept.conversation(body, key.holder)

    async def kept_events(events: Parts) -> Parts:
        async with aclosing(events) as open_events:
            async for event in open_events:
                if event["type"] in ("response.completed", "response.incomplete"):
                    keep(event["response"])
                yield event

    def events(service: Service, slot: Slot, chunks: Parts) -> Events:
        return named_events(or_error(service, slot, kept_events(response_events(body, chunks))))

    return await answer_chat(
        service,
        request,
        body,
        team=production.name,
        key=key,
        asked=asked,
        kind="resp",
        events=events,
        form=lambda reply: keep(response_of(body, reply)),
    )


def add_to_episodes(routes: APIRouter, episodes: Episodes) -> None:
    """Adds the routes to the episodes of programs."""
    kept_of: WeakKeyDictionary[ProgramEpisode, KeptResponses] = WeakKeyDictionary()

    async def respond(episode: ProgramEpisode, agent: str, body: ResponsesRequest, request: Request) -> Response:
        kept = kept_of.setdefault(episode, KeptResponses(max_characters=EPISODE_CHARACTERS))
        asked, keep = kept.conversation(body, agent)
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


async def named_events(parts: Parts) -> Events:
    """Yields each part as an event that is named by its `type`; an error is the last of them, named `error`."""
    number = 0
    async with aclosing(parts) as open_parts:
        async for part in open_parts:
            if error := part.get("error") if "type" not in part else None:
                about = {name: error[name] for name in ("code", "message", "param")}
                part = {"type": "error", "sequence_number": number, **about, **part}
            number += 1
            yield f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"
