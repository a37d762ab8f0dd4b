"""messages: Anthropic's Messages API as a form of the chat API, by the code of vLLM's own server.

POST /v1/messages ──chat_of_messages──> ChatRequest ──> chat completion ──message_of──────> message
                                                    └──> its events      ──message_events──> server-sent events
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from serve_apps.engines.vllm.messages import chat_body, message_body, message_lines
from serve_apps.openai_api.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from serve_apps.openai_api.protocol import (
    MAX_ECHO,
    ApiError,
    Body,
    RequestBody,
    invalid_body_error,
    not_too_deep,
)
from serve_apps.openai_api.sampling_fields import JsonSchema

Block = Annotated[dict[str, Any], AfterValidator(not_too_deep)]
"""A part of a content. What it says is text of any length, as where the content is a string."""

UNREAD = {"thinking_token_budget": "thinking.budget_tokens"}
"""Fields of vLLM's chats that engines here do not hold to, and what asks for them. `max_tokens` bounds thoughts and answer."""


class AnyMessage(Body):
    """A message, of which the bounds alone are looked at here; vLLM's model reads the rest."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class CountRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`: what of a message is read by the model."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[JsonSchema], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool = False

    @property
    def user(self) -> str | None:
        """The id of the user who asks."""
        metadata = (self.model_extra or {}).get("metadata")
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        return user if isinstance(user, str) else None


def chat_of_messages(request: CountRequest) -> ChatRequest:
    """Returns the chat that a request asks for; ApiError 400 where vLLM's model or the chat API refuses it."""
    try:
        asked = request.model_dump(exclude_unset=True)
        body, unread = chat_body(asked, is_count=not isinstance(request, MessagesRequest))
        unread += [said for field, said in UNREAD.items() if body.pop(field, None) is not None]
        chat_request = ChatRequest.model_validate(body | _continued(body["messages"]))
    except ValidationError as error:
        raise invalid_body_error(list(error.errors())) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ApiError(
            400,
            f"messages: a block is not as the Messages API has it: {str(error)[:MAX_ECHO]}",
            code="invalid_value",
            param="messages",
        ) from None
    chat_request.name_unread(unread)
    return chat_request


def _continued(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Returns what makes the answer go on with the last message, where that is text of the assistant: so says Anthropic's API."""
    last = messages[-1] if messages else {}
    is_begun = last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    return {"add_generation_prompt": False, "continue_final_message": True} if is_begun else {}


def message_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat completion of one choice as a message."""
    return {"stop_reason": None, "stop_sequence": None, **message_body(reply), "troupe": reply["troupe"]}


async def message_events(events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """Yields the data lines of a streamed chat completion as the events of a message; an error ends them.

    Closing the iterator closes `events`, too.
    """
    errors: list[str] = []

    async def until_error() -> AsyncGenerator[str]:
        async for event in events:
            if event.startswith('data: {"error"'):
                errors.append(event)
                return
            yield event

    async with aclosing(events), aclosing(until_error()) as lines, aclosing(message_lines(lines)) as converted:
        async for event in converted:
            yield event
    for error in errors:
        body = anthropic_error(json.loads(error.removeprefix("data: ")))
        yield f"event: error\ndata: {json.dumps(body)}\n\n"


def anthropic_error(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an error's body in Anthropic's form; its kinds are OpenAI's, but for those of servers."""
    error = body["error"]
    kind = {"server_error": "api_error"}.get(error["type"], error["type"])
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}
