"""responses: OpenAI's Responses API as a form of the chat API: what is asked, answered and streamed in the one is told in the other.

    POST /v1/responses ──chat_of──> ChatRequest ──> chat completion  ──response_of──────> response
                                               └──> its chunks       ──response_events──> server-sent events

A response is what one completion says: a message, and after it the calls of functions.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from serve_apps.openai_api.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from serve_apps.openai_api.protocol import Body, RequestBody, invalid_body_error
from serve_apps.openai_api.sampling_fields import JsonSchema, Whole

Item = dict[str, Any]
"""An input or output item in OpenAI's form."""


class ItemText(Body):
    """One text of an item."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""


Texts = str | Annotated[list[ItemText], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(Body):
    """A message of any role."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class CallItem(Body):
    """A call of a function, as a response had it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Body):
    """What the caller's function returned."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(Body):
    """Thoughts of an earlier response; they are left out, as chat templates leave them out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["reasoning"]


class FunctionOnOffer(Body):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer."""

    model_config = ConfigDict(extra="ignore", strict=True, validate_by_name=True, validate_by_alias=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Body):
    """How much the model thinks; summaries are not made."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseStreamOptions(Body):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestBody):
    """The body of `POST /v1/responses`."""

    model: str
    input: (
        str
        | Annotated[
            list[MessageItem | CallItem | CallOutputItem | ReasoningItem],
            Field(max_length=MAX_MESSAGES, fail_fast=True),
        ]
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    tools: Annotated[list[FunctionOnOffer], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: list[str] = Field(default_factory=list)
    """What else the response may hold: nothing of it is made here."""
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump() for item in self.input]


def chat_of(request: ResponsesRequest, before: Sequence[Item] = ()) -> ChatRequest:
    """Returns the chat that a request asks for; ApiError 400 where there is none.

    Args: before: the items of the response that it continues, its own input included.
    """
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    choice: Any = request.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    body = {
        "model": request.model,
        "messages": [*instructions, *_messages([*before, *request.items])],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools
        ],
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text.format),
        "reasoning_effort": request.reasoning.effort,
        "verbosity": request.text.verbosity,
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
        "user": request.user,
        "store": request.store,
        "metadata": request.metadata,
    }
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise invalid_body_error(list(error.errors())) from None


def response_of(request: ResponsesRequest, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat completion of one choice as a response."""
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[Item] = []
    if message["content"] or not calls:
        output.append(_message_item(_new_id("msg"), message["content"] or "", status=status))
    output += [_call_item(_new_id("fc"), call) for call in calls]
    return _response(request, reply, output, status=status, usage=reply["usage"])


async def response_events(
    request: ResponsesRequest, chunks: AsyncIterator[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any]]:
    """Yields the chunks of a chat completion of one choice as the events of a response; the last one has it whole."""
    numbers = itertools.count()

    def event(kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(numbers), **data}

    output: list[Item] = []
    text, reason = "", ""
    envelope: dict[str, Any] = {}
    usage: dict[str, int] = {}
    message_id = _new_id("msg")
    place = {"item_id": message_id, "output_index": 0, "content_index": 0}
    async for chunk in chunks:
        if not envelope:
            envelope = dict(chunk)
            begun = _response(request, chunk, [], status="in_progress", usage=None)
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)
        envelope |= {name: chunk[name] for name in ("troupe", "usage") if name in chunk}
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                if not text:
                    item = _message_item(message_id, None, status="in_progress")
                    yield event("response.output_item.added", output_index=0, item=item)
                    yield event("response.content_part.added", **place, part=_text_part(""))
                text += delta["content"]
                yield event("response.output_text.delta", **place, delta=delta["content"], logprobs=[])
            for call in delta.get("tool_calls") or ():
                output.append(_call_item(_new_id("fc"), call))
            reason = choice["finish_reason"] or reason
    status = "incomplete" if reason == "length" else "completed"
    if text or not output:
        item = _message_item(message_id, text, status=status)
        if not text:
            yield event("response.output_item.added", output_index=0, item=item)
            yield event("response.content_part.added", **place, part=_text_part(""))
        yield event("response.output_text.done", **place, text=text, logprobs=[])
        yield event("response.content_part.done", **place, part=_text_part(text))
        yield event("response.output_item.done", output_index=0, item=item)
        output.insert(0, item)
    for index, item in enumerate(output):
        if item["type"] == "function_call":
            at = {"item_id": item["id"], "output_index": index}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield event("response.output_item.added", output_index=index, item=begun)
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
            yield event("response.output_item.done", output_index=index, item=item)
    whole = _response(request, envelope, output, status=status, usage=usage)
    yield event(f"response.{status}", response=whole)


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the messages of items; what one completion said, its text and its calls, becomes one message again."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages else {}
        if kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            calls = {"id": item["call_id"], "type": "function", "function": call}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": None}
                messages.append(last)
            last.setdefault("tool_calls", []).append(calls)
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
            messages.append(answer)
    return messages


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.json_schema or {}}}


def _response(
    request: ResponsesRequest,
    reply: Mapping[str, Any],
    output: list[Item],
    *,
    status: str,
    usage: Mapping[str, int] | None,
) -> dict[str, Any]:
    return {
        "id": reply["id"],
        "object": "response",
        "created_at": reply["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": request.text.model_dump(exclude_none=True, by_alias=True) or {"format": {"type": "text"}},
        "tool_choice": request.model_dump()["tool_choice"],
        "tools": [tool.model_dump() for tool in request.tools],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": request.user,
        **({"troupe": reply["troupe"]} if "troupe" in reply else {}),
    }


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message_item(item_id: str, text: str | None, *, status: str) -> Item:
    content = [] if text is None else [_text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(item_id: str, call: Mapping[str, Any]) -> Item:
    function = call["function"]
    about = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": item_id, "type": "function_call", "call_id": call["id"], **about, "status": "completed"}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def event_text(event: Mapping[str, Any]) -> str:
    """Returns an event as it is sent: named by its `type`, with all of it as data."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
