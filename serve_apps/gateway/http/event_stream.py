"""event_stream: the parts of a reply -> server-sent events, and a slot that is held until the stream has ended."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi.responses import Response, StreamingResponse

from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.slots import Slot
from serve_apps.openai_api.http_errors import STREAM
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.response_events import event_text

StartStream = Callable[[AsyncGenerator[str], dict[str, str], Callable[[], None]], Response]
"""(events, headers, on_end) -> the response that streams the events and calls `on_end` after the last."""


class SlotStream(StreamingResponse):
    """Server-sent events that hold a slot until they end, however they end."""

    def __init__(
        self, slot: Slot, events: AsyncGenerator[str], headers: dict[str, str], on_end: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type=STREAM, headers={"Cache-Control": "no-cache", **headers})
        self._slot, self._events, self._on_end = slot, events, on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events, then releases the slot."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Closing the events ends the sampling. Only then is the slot free, also where the caller has left.
            await self._events.aclose()
            self._slot.release()
            self._on_end()


@contextmanager
def released_unless_streamed(service: Service, slot: Slot) -> Iterator[StartStream]:
    """Releases the slot at the end of the block, or at the end of the stream if the block has started one.

    An error that the gateway caused and not the caller counts as a failure of the team.
    """
    streams: list[SlotStream] = []

    def start_stream(events: AsyncGenerator[str], headers: dict[str, str], on_end: Callable[[], None]) -> Response:
        streams.append(SlotStream(slot, events, headers, on_end))
        return streams[0]

    try:
        with service.counting_failures(slot.team):
            yield start_stream
    finally:
        if not streams:
            slot.release()


async def chat_events(service: Service, slot: Slot, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """Yields the chunks of a chat as data lines and, unless there was an error, `[DONE]`."""
    has_failed = False
    async with aclosing(data_events(service, slot, chunks)) as events:
        async for event in events:
            has_failed = event.startswith('data: {"error"')
            yield event
    if not has_failed:
        yield "data: [DONE]\n\n"


async def data_events(service: Service, slot: Slot, parts: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """Yields each part as a data line. The status is sent by then, so that an error is told as the last of them."""
    async with aclosing(_or_error(service, slot, parts)) as open_parts:
        async for part in open_parts:
            yield f"data: {json.dumps(part)}\n\n"


async def named_events(service: Service, slot: Slot, parts: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """Yields each part as an event that is named by its `type`; an error is the last of them, named `error`."""
    number = 0
    async with aclosing(_or_error(service, slot, parts)) as open_parts:
        async for part in open_parts:
            if error := part.get("error") if "type" not in part else None:
                about = {name: error[name] for name in ("code", "message", "param")}
                part = {"type": "error", "sequence_number": number, **about, **part}
            number += 1
            yield event_text(part)


async def _or_error(
    service: Service, slot: Slot, parts: AsyncGenerator[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
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
