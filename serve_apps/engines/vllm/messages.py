"""messages: Anthropic's messages <-> chats of OpenAI's form, by the converters of vLLM's own server. They need no engine.

`load_converters` imports them, which takes seconds and 0.7 GB.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from importlib import import_module
from typing import Any, cast

RESULT_PARTS = ("text", "image", "tool_reference")
"""What the converter reads of a tool's result."""


def load_converters() -> None:
    """Imports what the functions below use of vLLM."""
    import_module("vllm.entrypoints.anthropic.serving")


def chat_body(asked: Mapping[str, Any], *, is_count: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the body of a chat for that of a message, or of a request to count its tokens, and the fields that vLLM does not know.

    Raises pydantic's ValidationError where vLLM's model refuses it, and ValueError, TypeError or AttributeError: that model leaves
    open what is in a tool's result, and its converter takes it for text and sources of images.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.exceptions import VLLMClientError

    kind = AnthropicCountTokensRequest if is_count else AnthropicMessagesRequest
    message_request = kind.model_validate(asked)
    for message in message_request.messages:
        for block in message.content if isinstance(message.content, list) else ():
            _check_result(block)
    try:
        chat = AnthropicServingMessages.to_chat_completion_request(message_request)
    except VLLMClientError as error:  # which is no ValueError, so that pydantic lets it pass
        raise ValueError(str(error)) from None
    body: dict[str, Any] = chat.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return body, sorted(asked.keys() - kind.model_fields.keys())


def _check_result(block: Any) -> None:
    """Raises ValueError for a part of a tool's result that the converter would leave out: documents, search results."""
    content = getattr(block, "content", None)
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in RESULT_PARTS:
            raise ValueError(
                f"a tool's result holds {part.get('type')!r}, of which nothing would be read: give its text as `text`"
            )


def message_body(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat completion of one choice as a message."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    nobody = cast(AnthropicServingMessages, None)  # the converters use nothing of a server
    message = AnthropicServingMessages.messages_full_converter(nobody, ChatCompletionResponse.model_validate(reply))
    body: dict[str, Any] = message.model_dump(mode="json", exclude_none=True)
    return body


def message_lines(lines: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """Yields the data lines of a streamed chat completion as the events of a message. It does not close what it reads."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    nobody = cast(AnthropicServingMessages, None)
    converted: AsyncGenerator[str] = AnthropicServingMessages.message_stream_converter(nobody, lines)
    return converted
