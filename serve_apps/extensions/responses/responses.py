"""responses: OpenAI's Responses API as a form of the chat API: what is asked and answered in the one is told in the other.

    POST /v1/responses ──chat_of──> ChatRequest ──> chat completion  ──response_of──────> response
                                               └──> its chunks       ──response_events──> server-sent events (`response_events`)

A response is what one completion says: its thoughts, a message, and after it the calls of functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationError, model_validator

from serve_apps.openai_api.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from serve_apps.openai_api.protocol import Body, RequestBody, invalid_body_error
from serve_apps.openai_api.sampling_fields import JsonSchema, Whole

Item = dict[str, Any]
"""An input or output item in OpenAI's form."""


class ItemText(Body):
    """One text of an item."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


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


class ReasoningText(Body):
    """One text of thoughts."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """Thoughts of an earlier response. They belong to the message or the call that follows."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


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

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("a format of type 'json_schema' needs `schema`, beside `name`")
        return self


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
    if thoughts := message.get("reasoning"):
        output.append(reasoning_item(new_id("rs"), thoughts))
    if message["content"] or not calls:
        output.append(message_item(new_id("msg"), message["content"] or "", status=status))
    output += [call_item(new_id("fc"), call) for call in calls]
    return response_body(request, reply, output, status=status, usage=reply["usage"])


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the messages of items; what one completion said, its text and its calls, becomes one message again."""
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, str] = {}
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages else {}
        if kind == "reasoning":
            thoughts = {"reasoning": _text(item["content"])} if item.get("content") else {}
        elif kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
            if item["role"] == "assistant":
                messages[-1] |= thoughts
                thoughts = {}
        elif kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            calls = {"id": item["call_id"], "type": "function", "function": call}
            if last.get("role") != "assistant" or thoughts:
                last = {"role": "assistant", "content": None, **thoughts}
                thoughts = {}
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
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.json_schema}}


def response_body(
    request: ResponsesRequest,
    reply: Mapping[str, Any],
    output: list[Item],
    *,
    status: str,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns a response in OpenAI's form.

    Args:
        reply: the chat completion, or one of its chunks.
        usage: that of the chat completion; None while the response is under way.
    """
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


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def message_item(item_id: str, text: str | None, *, status: str) -> Item:
    """Returns a message with one text; with none where the message has only begun."""
    content = [] if text is None else [text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(item_id: str, thoughts: str, *, status: str = "completed") -> Item:
    """Returns thoughts; their summary is empty, since none is made."""
    content = [{"type": "reasoning_text", "text": thoughts}] if thoughts else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def text_part(text: str) -> dict[str, Any]:
    """Returns a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, call: Mapping[str, Any]) -> Item:
    """Returns a call of a function, given as a chat completion has it."""
    function = call["function"]
    about = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": item_id, "type": "function_call", "call_id": call["id"], **about, "status": "completed"}


def new_id(kind: str) -> str:
    """Returns a new id that begins with the kind of what it names."""
    return f"{kind}_{secrets.token_hex(12)}"
