"""chat_request: the body of a chat completion, as the clients of OpenAI's API and of vLLM's server send it.

null                            not asked for
what changes nothing here       taken (`service_tier`, `prompt_cache_key`, ...)
what the engine can do          done, in vLLM's own words (`repetition_penalty`, `structured_outputs`, ...)
keys of messages that nobody
reads                           dropped; `ChatRequest.dropped` names them
anything else                   refused by name
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from serve_apps.chat.tokenizer import ChatTokenizer, PromptSettings
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError, Body
from serve_apps.openai_api.sampling_fields import JsonSchema, SamplingFields, Whole

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_TOOLS = 128
"""Functions on offer, and calls in one message."""
OWN_KEYS = {"index", "parsed", "parsed_arguments"}
"""Keys that OpenAI's own client adds to an answer, and sends back with it."""


class Lenient(Body):
    """A part of a body whose unknown keys are dropped: frameworks mark messages and tools for themselves and for others."""

    model_config = ConfigDict(extra="ignore", strict=True)

    _dropped: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _drop_unknown(cls, value: Any, handler: Callable[[Any], Any]) -> Any:
        model = handler(value)
        if isinstance(value, dict):
            known = cls.model_fields.keys() | {field.alias for field in cls.model_fields.values()}
            model._dropped = tuple(sorted(str(key) for key in value.keys() - known - OWN_KEYS))
        return model


class Function(Lenient):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionTool(Lenient):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates and parsers read it: always with parameters."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {}
        if self.function.strict is not None:
            function["strict"] = self.function.strict
        return {"type": "function", "function": function}


class CalledFunction(Lenient):
    """A function call as the model made it; the arguments are JSON text."""

    name: str
    arguments: str


class ToolCallOfModel(Lenient):
    """One tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Lenient):
    """One part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Lenient):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallOfModel], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    """The thoughts that belong to the content; templates of reasoning models read them. `reasoning_content` is the same."""
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> Message:
        if self.content is None and not self.tool_calls and not self.thoughts:
            raise ValueError(f"a message of role {self.role!r} has neither content nor tool calls")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs tool_call_id, the id of the call that it answers")
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it: arguments of calls are data, not JSON text.

        Ids of calls and missing content are handed on as they came: some templates ask for the one or look at the other.
        """
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        if self.thoughts:
            message |= {"reasoning": self.thoughts, "reasoning_content": self.thoughts}
        return message

    @property
    def thoughts(self) -> str | None:
        """The thoughts, under whichever key they came."""
        return self.reasoning or self.reasoning_content

    @property
    def text(self) -> str | None:
        """The content as one text; None where there is none."""
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


def _call_for_template(call: ToolCallOfModel) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: Whole | None = Field(None, ge=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: JsonSchema | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    include_reasoning: bool = True
    """Whether the answer shows the thoughts of a model that thinks."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template, where it has one of this name; so is `verbosity`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the completion continues the last message; `add_generation_prompt` must be false."""
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text"]] | None = None
    _unread: set[str] = PrivateAttr(default_factory=set)

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.must_call and not self.tools:
            raise ValueError("tool_choice asks for a call, but tools is empty")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in self.tool_names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools: {self.tool_names}"
            )
        if self.structured_outputs is not None and self.must_call:
            raise ValueError("structured_outputs excludes a tool_choice that asks for a call")
        last = self.messages[-1].role if self.messages else ""
        if self.continue_final_message and (self.add_generation_prompt or last != "assistant"):
            raise ValueError(
                "continue_final_message needs add_generation_prompt: false and a last message of role 'assistant'"
            )
        return self

    @property
    def limit(self) -> int | None:
        """The limit of completion tokens; None: the agent's own."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that stand in the prompt: all, whatever the choice is, so that prompts of one chat continue each other."""
        return [tool.for_template() for tool in self.tools or []]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools whose calls are read."""
        return [] if self.tool_choice == "none" else self.shown_tools

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools."""
        return [tool.function.name for tool in self.tools or []]

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def prompt_settings(self, tokenizer: ChatTokenizer, own: Mapping[str, Any]) -> PromptSettings:
        """Returns how the model's template shows the messages; variables that it does not have are left out.

        Args: own: the variables of the agent that is asked; the request's go before them.
        """
        return PromptSettings(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables={**own, **tokenizer.known_variables(self.template_variables)},
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the chat template is given beside messages and tools."""
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {key: value for key, value in named.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def dropped(self) -> list[str]:
        """The keys that were dropped, as `messages.KEY` and `tools.KEY`."""
        return sorted({f"{place}.{key}" for place, part in self._parts() for key in part._dropped} | self._unread)

    def name_unread(self, names: Iterable[str]) -> None:
        """Adds to `dropped` what the request said in another API's words and nobody reads."""
        self._unread |= set(names)

    @property
    def last_user_text(self) -> str:
        """The content of the last user message; empty where there is none."""
        contents = [message.text or "" for message in self.messages if message.role == "user"]
        return contents[-1] if contents else ""

    def _parts(self) -> Iterator[tuple[str, Lenient]]:
        for message in self.messages:
            yield "messages", message
            for call in message.tool_calls or []:
                yield from (("messages.tool_calls", call), ("messages.tool_calls", call.function))
            if isinstance(message.content, list):
                yield from (("messages.content", part) for part in message.content)
        for tool in self.tools or []:
            yield from (("tools", tool), ("tools.function", tool.function))


@contextmanager
def refusals_of_template() -> Iterator[None]:
    """Turns an error of the work inside into ApiError 400.

    A template is a program of somebody else, which reads what a caller sent: messages, tools, variables of any type. It may
    raise anything, and that is no fault of the gateway or of the team that answers.
    """
    try:
        yield
    except Exception as error:
        why = str(error)[:MAX_ECHO] or type(error).__name__
        raise ApiError(
            400, f"the chat template refuses these messages: {why}", code="invalid_value", param="messages"
        ) from error
