"""protocol: the request bodies of the OpenAI API that the gateway supports, strictly validated; and OpenAI's form of an error.

A field that is valid for OpenAI but not supported here is refused by name, never ignored: a caller who asked for
`response_format` and got free text would look for the error elsewhere. Fields that do not change the reply (`user`, `store`,
`metadata`) are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_TOOLS = 128
"""Functions on offer, and calls in one message."""
MAX_DEPTH = 20


class ApiError(Exception):
    """An error for the caller: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """Returns `{"error": {"message", "type", "param", "code"}}`."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Returns `Retry-After` in whole seconds, where trying again later may help."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}


class Body(BaseModel):
    """A request body, which may have no unknown field and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RequestBody(Body):
    """The whole body of a request: JSON that can be stored."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_stored(cls, value: Any) -> Any:
        """Refuses what JSON's parser lets through: half a surrogate pair, NaN and infinity.

        Neither Arrow nor a tokenizer takes them, which would show when others' episodes are stored with this one.
        """
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"the text {half!r} is half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise ValueError("values are nested too deep") from None
        except ValueError:
            raise ValueError("a number is NaN or infinite, which JSON does not have") from None
        return value


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    # Level by level and not by recursion, which too deep a value would break.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for container in level if isinstance(container, dict | list) for item in _items_of(container)]
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
    return value


def _items_of(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


Metadata = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""JSON values that are stored with an episode."""


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class FunctionTool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """A function call as the model made it; the arguments are JSON text."""

    name: str
    arguments: str


class ToolCallOfModel(Body):
    """One tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    """One part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallOfModel], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
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
    include_obfuscation: bool | None = None


class ResponseFormat(Body):
    """The form of the answer; text is the only one supported."""

    type: Literal["text"]


class ChatRequest(RequestBody):
    """The body of `POST /v1/chat/completions`."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @field_validator("n", "stream", "logprobs", "top_logprobs", "temperature", "top_p", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any, info: Any) -> Any:
        """Accepts null for a field's default: OpenAI's clients may send null for what they leave to the server."""
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _null_is_zero(cls, value: Any) -> Any:
        return 0.0 if value is None else value

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if any(not stop for stop in self.stops):
            raise ValueError("stop has an empty string, which would end every completion at once")
        if self.tools is not None and not self.tools:
            raise ValueError("tools is empty: leave it out")
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
    def offered_tools(self) -> list[FunctionTool]:
        """The tools that the model is offered."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def last_user_text(self) -> str:
        """The content of the last user message; empty where there is none."""
        contents = [message.text or "" for message in self.messages if message.role == "user"]
        return contents[-1] if contents else ""


class RunRequest(RequestBody):
    """The body of `POST /v1/workflows/{team}/runs`: a task for the whole team."""

    prompt: str = Field(min_length=1)
    metadata: Metadata = Field(default_factory=dict)
    """Further fields of the task, as the workflow reads them."""
    seed: int | None = Field(None, ge=0, lt=2**31)
    stream: bool = False
    user: str | None = None
    """Id of the user who asks: a user's requests go to the same team while traffic is split."""
    store: bool | None = None
    """Whether the episode may be stored, for feedback and training; null: as `gateway.capture.consent` says."""


class EpisodeRequest(RequestBody):
    """The body of `POST /v1/episodes`: an episode of a team that the caller's program runs."""

    team: str
    prompt: str = ""
    """Text of the task; default: the last user message of the program's first call."""
    metadata: Metadata = Field(default_factory=dict)
    """Further fields of the task, for credit rules and for those who read the trace."""
    seed: int | None = Field(None, ge=0, lt=2**31)
    """Seed from which the seeds of all turns follow."""
    user: str | None = None
    """Id of the user who asks: a user's episodes go to the same team while traffic is split."""
    store: bool | None = None
    """Whether the episode may be stored, as in a run of a workflow."""


class FeedbackRequest(RequestBody):
    """The body of `POST /v1/traces/{trace_id}/feedback`: feedback on an answer."""

    score: float | None = Field(None, ge=-1, le=1, allow_inf_nan=False)
    """From -1 (bad) to 1 (good)."""
    label: str | None = Field(None, max_length=100)
    comment: str | None = Field(None, max_length=4000)
    answer: str | None = Field(None, max_length=20_000)
    """The answer that would have been right."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> FeedbackRequest:
        if self.score is None and not self.label and not self.comment and self.answer is None:
            raise ValueError("feedback is empty: give a score, a label, a comment or the right answer")
        return self


def invalid_body_error(errors: list[Any]) -> ApiError:
    """Turns pydantic's errors about a body into one ApiError 400 that names the first field."""
    first: Mapping[str, Any] = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown or unsupported field {field!r}{more}", code="unsupported_field", param=field)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', message)}", code="invalid_json")
    return ApiError(400, f"{field or 'body'}: {message}{more}", code="invalid_value", param=field)
