"""response_events: the chunks of a chat completion -> the server-sent events of OpenAI's Responses API.

created, in_progress ──> thoughts ──> message ──> calls ──> completed or incomplete, with the whole response

Each item is announced, grows by deltas, and is told again when it is done.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from serve_apps.extensions.responses.responses import (
    Item,
    ResponsesRequest,
    call_item,
    message_item,
    new_id,
    reasoning_item,
    response_body,
    text_part,
)

Event = dict[str, Any]


async def response_events(request: ResponsesRequest, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Event]:
    """Yields the chunks of a chat completion of one choice as the events of a response; the last one has it whole.

    Closing the iterator closes `chunks`, too.
    """
    stream = _Stream(request)
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in stream.add(chunk):
                yield event
    for event in stream.end():
        yield event


async def named_events(parts: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    """Yields each part as an event that is named by its `type`; an error is the last of them, named `error`."""
    number = 0
    async with aclosing(parts) as open_parts:
        async for part in open_parts:
            if error := part.get("error") if "type" not in part else None:
                about = {name: error[name] for name in ("code", "message", "param")}
                part = {"type": "error", "sequence_number": number, **about, **part}
            number += 1
            yield f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"


class _Stream:
    """Builds up one response. Its items come one after the other: thoughts, a message, calls."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._numbers = itertools.count()
        self._envelope: dict[str, Any] = {}
        self._output: list[Item] = []
        self._thoughts = self._text = self._reason = ""
        self._calls: list[Item] = []
        self._message_id, self._reasoning_id = new_id("msg"), new_id("rs")

    def add(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if not self._envelope:
            self._envelope = dict(chunk)
            begun = response_body(self._request, chunk, [], status="in_progress", usage=None)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        self._envelope |= {name: chunk[name] for name in ("troupe", "usage") if chunk.get(name)}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thoughts := delta.get("reasoning"):
                yield from self._think(thoughts)
            if content := delta.get("content"):
                yield from self._say(content)
            self._calls += [call_item(new_id("fc"), call) for call in delta.get("tool_calls") or ()]
            self._reason = choice["finish_reason"] or self._reason

    def end(self) -> Iterator[Event]:
        yield from self._thoughts_end()
        status = "incomplete" if self._reason == "length" else "completed"
        if self._text or not self._calls:
            yield from self._message_end(status)
        for item in self._calls:
            yield from self._call(item)
        usage = self._envelope.get("usage")
        whole = response_body(self._request, self._envelope, self._output, status=status, usage=usage)
        yield self._event(f"response.{status}", response=whole)

    def _think(self, thoughts: str) -> Iterator[Event]:
        if not self._thoughts:
            yield self._added(reasoning_item(self._reasoning_id, "", status="in_progress"))
        self._thoughts += thoughts
        yield self._event("response.reasoning_text.delta", **self._part_of(self._reasoning_id), delta=thoughts)

    def _thoughts_end(self) -> Iterator[Event]:
        if self._thoughts and not self._output:
            at = self._part_of(self._reasoning_id)
            yield self._event("response.reasoning_text.done", **at, text=self._thoughts)
            yield self._done(reasoning_item(self._reasoning_id, self._thoughts))

    def _say(self, content: str) -> Iterator[Event]:
        yield from self._thoughts_end()
        if not self._text:
            yield from self._message_begin()
        self._text += content
        at = self._part_of(self._message_id)
        yield self._event("response.output_text.delta", **at, delta=content, logprobs=[])

    def _message_begin(self) -> Iterator[Event]:
        yield self._added(message_item(self._message_id, None, status="in_progress"))
        yield self._event("response.content_part.added", **self._part_of(self._message_id), part=text_part(""))

    def _message_end(self, status: str) -> Iterator[Event]:
        if not self._text:
            yield from self._message_begin()
        at = self._part_of(self._message_id)
        yield self._event("response.output_text.done", **at, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **at, part=text_part(self._text))
        yield self._done(message_item(self._message_id, self._text, status=status))

    def _call(self, item: Item) -> Iterator[Event]:
        at = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._added({**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        yield self._done(item)

    def _added(self, item: Item) -> Event:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Item) -> Event:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part_of(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **data: Any) -> Event:
        return {"type": kind, "sequence_number": next(self._numbers), **data}
