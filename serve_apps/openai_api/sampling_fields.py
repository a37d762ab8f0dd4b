"""sampling_fields: what the bodies of chats and of bare completions have in common: how to sample, and in which form.

They are what the clients of OpenAI's API and of vLLM's server send; null is "not asked for".
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from serve_apps.openai_api.protocol import Body, RequestBody, not_too_deep
from stores.types import Sampling

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP = 1000
"""Characters of a stop string: the end of a text is compared with it at every token."""
MAX_BIASES = 1024
MAX_TOKEN_IDS = 1024
MAX_STOP_IDS = 64
"""With `min_tokens`, vLLM's runner on GPUs dies of more than 128, those of the model folder among them."""
MAX_VALUES = 1024
"""Values of a choice."""
MAX_GRAMMAR = 65_536
"""Characters of a regular expression, a grammar or a schema: an engine compiles it before it samples."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_too_long(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise ValueError(f"has more than {MAX_GRAMMAR} characters")
    if "\0" in text or "\\u0000" in text:  # xgrammar does not survive it
        raise ValueError("has the character NUL")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which may be written as 5.0."""
Stop = Annotated[str, Field(max_length=MAX_STOP)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(not_too_deep), AfterValidator(_not_too_long)]
Grammar = Annotated[str, Field(min_length=1), AfterValidator(_not_too_long)]


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far, as vLLM's clients may ask."""
    include_obfuscation: bool | None = None


class SchemaOfAnswer(Body):
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
    """What an answer must match, in the words of vLLM; exactly one.

    vLLM's `structural_tag` is none of them: nothing limits the time in which it is compiled. Its settings of whitespace are the engine's.
    """

    model_config = ConfigDict(extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)

    json_schema: JsonSchema | Grammar | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: (
        Annotated[
            list[Grammar],
            Field(min_length=1, max_length=MAX_VALUES, fail_fast=True),
            AfterValidator(_not_too_long),
        ]
        | None
    ) = None
    grammar: Grammar | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        kinds = (self.json_schema, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar and json_object: true")
        return self


class SamplingFields(RequestBody):
    """The part of a body that says how to sample."""

    model: str
    n: Whole = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Whole = Field(0, ge=-1, lt=2**31)
    """0 and -1: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, le=10, allow_inf_nan=False)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=MAX_BIASES)
    min_tokens: Whole = Field(0, ge=0, lt=2**31)
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    ignore_eos: bool = False
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Whether the reply has the token ids of prompt and completions."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Literal[0] = 0
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if any(not stop for stop in self.stops):
            raise ValueError("stop has an empty string, which would end every completion at once")
        if (
            self.structured_outputs is not None
            and self.response_format is not None
            and self.response_format.type != "text"
        ):
            raise ValueError("structured_outputs and response_format exclude each other")
        return self

    @property
    def stops(self) -> list[str]:
        """The strings before which the completion ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def own_form(self) -> dict[str, Any]:
        """What `response_format` or `structured_outputs` asks for: arguments of vLLM's `StructuredOutputsParams`, or empty."""
        if self.structured_outputs is not None:
            asked = self.structured_outputs.model_dump(exclude_defaults=True, by_alias=True)
            return {kind: value for kind, value in asked.items() if value is not False}
        if self.response_format is None or self.response_format.type == "text":
            return {}
        schema = self.response_format.json_schema
        return {"json_object": True} if schema is None else {"json": schema.json_schema}

    def sampling(self, default: Sampling, *, max_tokens: int, constraint: str) -> Sampling:
        """Returns what the request says of how to sample, and of what it leaves open, a temperature, the default's."""
        names = {field.name for field in fields(Sampling)} & type(self).model_fields.keys()
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(
            default, **asked | {"top_k": max(self.top_k, 0), "max_tokens": max_tokens, "constraint": constraint}
        )

    @property
    def engine_settings(self) -> dict[str, Any]:
        """What changes the sampling beside temperature and filters: see `GenerateRequest.settings`, without defaults."""
        settings: dict[str, Any] = {
            name: getattr(self, name)
            for name in ENGINE_SETTINGS
            if getattr(self, name) != type(self).model_fields[name].default
        }
        if self.logit_bias is not None:
            settings["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return settings


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
