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
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from serve_apps.openai_api.protocol import Body, RequestBody, not_too_deep

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_TOOLS = 128
"""Functions on offer, and calls in one message."""
MAX_BIASES = 1024
MAX_TOKEN_IDS = 1024
MAX_VALUES = 1024
"""Values of a choice."""
MAX_GRAMMAR = 65_536
"""Characters of a regular expression, a grammar or a schema: an engine compiles it before it samples."""
OWN_KEYS = {"index", "parsed", "parsed_arguments"}
"""Keys that OpenAI's own client adds to an answer, and sends back with it."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_too_long(value: Any) -> Any:
    if len(value if isinstance(value, str) else json.dumps(value)) > MAX_GRAMMAR:
        raise ValueError(f"has more than {MAX_GRAMMAR} characters")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which may be written as 5.0."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(not_too_deep), AfterValidator(_not_too_long)]
Grammar = Annotated[str, Field(min_length=1), AfterValidator(_not_too_long)]


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
    reasoning_content: str | None = None
    """The thoughts that belong to the content; templates of reasoning models read them."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> Message:
        if self.content is None and not self.tool_calls:
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
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message

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


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far, as vLLM's clients may ask."""
    include_obfuscation: bool | None = None


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class SchemaOfAnswer(Lenient):
    """The JSON schema of an answer, with the name that OpenAI's API wants for it."""

    model_config = ConfigDict(extra="ignore", strict=True, validate_by_name=True, validate_by_alias=True)

    name: str = "answer"
    description: str | None = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOfAnswer | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type 'json_schema', and that type needs it")
        return self


class StructuredOutputs(Body):
    """What an answer must match, in the words of vLLM; exactly one of the first six."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)

    json_schema: JsonSchema | Grammar | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Annotated[list[Grammar], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)] | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: Grammar | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Grammar | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        kinds = (self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object: true and structural_tag")
        return self


class ChatRequest(RequestBody):
    """The body of `POST /v1/chat/completions`."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: Whole | None = Field(None, ge=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    n: Whole = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Whole = Field(0, ge=-1)
    """0 and -1: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=MAX_BIASES)
    min_tokens: Whole = Field(0, ge=0)
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool = False
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=20)
    return_token_ids: bool = False
    """Whether the reply has the token ids of prompt and completions."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: JsonSchema | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template, where it has one of this name; so is `verbosity`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the completion continues the last message; `add_generation_prompt` must be false."""
    priority: Literal[0] = 0
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if any(not stop for stop in self.stops):
            raise ValueError("stop has an empty string, which would end every completion at once")
        if self.must_call and not self.tools:
            raise ValueError("tool_choice asks for a call, but tools is empty")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in self.tool_names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools: {self.tool_names}"
            )
        if self.structured_outputs is not None and (self.must_call or self.form is not None):
            raise ValueError(
                "structured_outputs, response_format and a tool_choice that asks for a call exclude each other"
            )
        if self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != "assistant"):
            raise ValueError(
                "continue_final_message needs add_generation_prompt: false and a last message of role 'assistant'"
            )
        return self

    @property
    def stops(self) -> list[str]:
        """The strings before which the completion ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

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

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the answer, where it is not free text."""
        return None if self.response_format is None or self.response_format.type == "text" else self.response_format

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the chat template is given beside messages and tools."""
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {key: value for key, value in named.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def engine_settings(self) -> dict[str, Any]:
        """What changes the sampling beside temperature and filters: arguments of vLLM's `SamplingParams`, without defaults."""
        settings: dict[str, Any] = {
            name: getattr(self, name)
            for name in ENGINE_SETTINGS
            if getattr(self, name) != type(self).model_fields[name].default
        }
        if self.logit_bias is not None:
            settings["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return settings

    @property
    def dropped(self) -> list[str]:
        """The keys that were dropped, as `messages.KEY` and `tools.KEY`."""
        return sorted({f"{place}.{key}" for place, part in self._parts() for key in part._dropped})

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


ENGINE_SETTINGS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "ignore_eos",
)
"""Fields of a request that are handed to the engine as they are."""
