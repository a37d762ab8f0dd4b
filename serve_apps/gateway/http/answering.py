"""answering: what the routes share: the service, bodies that are read fast, answers at once or as events that hold a slot to their end."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from serve_apps.gateway.traffic.admission import Slot
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.http_errors import STREAM, unless_gone
from serve_apps.openai_api.protocol import ApiError

Events = AsyncGenerator[str]
Parts = AsyncGenerator[dict[str, Any]]
LONG_BYTES = 50_000
"""Bytes of a body from which on it is worth it to read it without a garbage collector."""


async def _service(request: Request) -> Service:  # async, since FastAPI runs others in threads
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service)]
"""The service of the application that got a request; `build_api` puts it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An answer that is ready to be made: at once, or as events."""

    headers: dict[str, str]
    reply: Callable[[], Awaitable[dict[str, Any]]]
    events: Callable[[], Events]
    on_end: Callable[[], None]
    """Is called once it has ended, complete or not, also where the caller has left; for a reply that another error ended, not."""


async def answered(
    service: Service, request: Request, slot: Slot, prepare: Callable[[], Awaitable[Work]], *, is_streamed: bool | None
) -> Response:
    """Prepares an answer and gives it; the slot is released at its end, or at that of its stream.

    An error that the gateway caused and not the caller counts as a failure of the team.
    """
    stream: SlotStream | None = None
    try:
        with service.counting_failures(slot.team):
            work = await prepare()
            if is_streamed:
                stream = SlotStream(service, slot, work)
                return stream
            try:
                reply = await unless_gone(request, service.within_timeout(work.reply()))
            except ApiError as error:
                if error.status == 499:  # what was sampled until then counts
                    work.on_end()
                    service.count_left(slot)
                raise
    finally:
        if stream is None:
            slot.release()
    work.on_end()
    return JSONResponse(reply, headers=work.headers)


class SlotStream(StreamingResponse):
    """Server-sent events that hold a slot until they end, however they end."""

    def __init__(self, service: Service, slot: Slot, work: Work) -> None:
        self._service, self._slot, self._events, self._on_end = service, slot, work.events(), work.on_end
        self._is_left = True
        super().__init__(self._until_end(), media_type=STREAM, headers={"Cache-Control": "no-cache", **work.headers})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events, then releases the slot."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Closing the events ends the sampling. Only then is the slot free, also where the caller has left.
            await self._events.aclose()
            self._slot.release()
            self._on_end()
            if self._is_left:
                self._service.count_left(self._slot)

    async def _until_end(self) -> Events:
        try:
            async for event in self._events:
                yield event
        except Exception:
            self._is_left = False
            raise
        self._is_left = False


async def chat_events(service: Service, slot: Slot, chunks: Parts) -> Events:
    """Yields the chunks of a chat as data lines and, unless there was an error, `[DONE]`."""
    has_failed = False
    async with aclosing(data_events(service, slot, chunks)) as events:
        async for event in events:
            has_failed = event.startswith('data: {"error"')
            yield event
    if not has_failed:
        yield "data: [DONE]\n\n"


async def data_events(service: Service, slot: Slot, parts: Parts) -> Events:
    """Yields each part as a data line. The status is sent by then, so that an error is told as the last of them."""
    async with aclosing(or_error(service, slot, parts)) as open_parts:
        async for part in open_parts:
            yield f"data: {json.dumps(part)}\n\n"


async def or_error(service: Service, slot: Slot, parts: Parts) -> Parts:
    """Yields the parts and, where the work ends in an error, its body."""
    try:
        with service.counting_failures(slot.team):
            async with aclosing(parts) as open_parts, service.answer_time():
                async for part in open_parts:
                    yield part
    except ApiError as error:
        yield error.body
    except TimeoutError:
        yield service.timeout_error.body


class LongBodyRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's own handler, which is given another kind of request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive, request._send))

        return handle


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = read_json(await self.body())
        return self._json


def read_json(body: bytes) -> Any:
    """Reads JSON as `json.loads` does, and raises what it raises: two megabytes in tens of milliseconds, whatever is in them.

    While Python's parser makes a million small lists, its garbage collector looks through them again and again: ten times the work,
    in which all callers wait. Nothing is garbage before the parser is done.
    """
    if len(body) < LONG_BYTES or not gc.isenabled():
        return json.loads(body)
    gc.disable()
    try:
        return json.loads(body)
    finally:
        gc.enable()
