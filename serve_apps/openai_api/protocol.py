"""protocol: what all request bodies have in common, the bodies of Troupe's own routes, and OpenAI's form of an error.

An unknown field is refused by name, never ignored: its sender would look elsewhere for the error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

MAX_DEPTH = 20
MAX_CONTAINERS = 20_000
"""Objects and lists in a body: what reads them takes microseconds for each, and all requests wait meanwhile."""
MAX_KEYS = 2_000
"""Keys of one object in a body: each may be an error of its own."""
MAX_VALUES = 50_000
"""Values in what is stored with an episode, and in a schema."""
MAX_ECHO = 200
"""Characters of what a caller sent that an error repeats."""


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
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def usage_body(num_prompt: int, num_completion: int) -> dict[str, Any]:
    """Returns OpenAI's `usage` of so many tokens."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


class Body(BaseModel):
    """A request body, which may have no unknown field and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RequestBody(Body):
    """The whole body of a request: JSON that can be stored, and is not made to be slow to read."""

    _num_characters: int = PrivateAttr(0)

    @model_validator(mode="wrap")
    @classmethod
    def _can_be_stored(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuses what JSON's parser lets through: half a surrogate pair, NaN and infinity, values without end.

        Neither Arrow nor a tokenizer takes the first two, which would show when others' episodes are stored with this one.
        """
        _not_too_many(value)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
            text.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"the text {half!r} is half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise ValueError("values are nested too deep") from None
        except ValueError:
            raise ValueError("a number is NaN or infinite, which JSON does not have") from None
        model = handler(value)
        model._num_characters = len(text)
        return model

    @property
    def num_characters(self) -> int:
        """The characters of the body as JSON: how much work it may be."""
        return self._num_characters


def _not_too_many(value: Any) -> None:
    """Raises ValueError where a value has too many objects and lists, or one with too many keys; looks at no more than that."""
    num, todo = 0, [value]
    while todo:
        container = todo.pop()
        if isinstance(container, dict):
            if len(container) > MAX_KEYS:
                raise ValueError(f"an object has {len(container)} keys, and at most {MAX_KEYS} are accepted")
            todo += [item for item in container.values() if isinstance(item, dict | list)]
        elif isinstance(container, list):
            todo += [item for item in container if isinstance(item, dict | list)]
        num += 1
        if num + len(todo) > MAX_CONTAINERS:
            raise ValueError(f"there are more than the {MAX_CONTAINERS} objects and lists that are accepted")


def not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    """Returns a value; ValueError where it is nested more than MAX_DEPTH deep, or has more than MAX_VALUES values."""
    # Level by level and not by recursion, which too deep a value would break.
    level: list[Any] = [value]
    num = 0
    for _ in range(MAX_DEPTH):
        num += sum(len(container) for container in level if isinstance(container, dict | list))
        if num > MAX_VALUES:
            raise ValueError(f"there are more than the {MAX_VALUES} values that are accepted")
        level = [item for container in level if isinstance(container, dict | list) for item in _items_of(container)]
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
    return value


def _items_of(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


Metadata = Annotated[dict[str, Any], AfterValidator(not_too_deep)]
"""JSON values that are stored with an episode."""


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
    first: Mapping[str, Any] = _nearest(errors)
    is_unknown = first["type"] == "extra_forbidden"
    place = [*first["loc"]]
    last = [place.pop()] if is_unknown else []  # called as the caller likes
    keys = [part for part in place if part != "body" and not _is_form(part)] + last
    field = ".".join(str(part)[:MAX_ECHO] for part in keys)[:MAX_ECHO] or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = str(first["msg"])[: 5 * MAX_ECHO].removeprefix("Value error, ")
    if is_unknown:
        return ApiError(400, f"unknown or unsupported field {field!r}{more}", code="unsupported_field", param=field)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', message)}", code="invalid_json")
    return ApiError(400, f"{field or 'body'}: {message}{more}", code="invalid_value", param=field)


FORM = re.compile(r"str|int|float|bool|constrained-.*|[\w-]+\[.*|([A-Z][a-z]*)+", re.DOTALL)
"""What pydantic calls one of the forms that a value may have, where an error says its place; no field is called so."""


def _is_form(part: str | int) -> bool:
    return isinstance(part, str) and FORM.fullmatch(part) is not None


def _nearest(errors: list[Any]) -> Mapping[str, Any]:
    """Returns the first error, or where its field may have several forms, that of the form that was meant: the error that lies deepest, or
    else one that is not about the type."""
    place = errors[0]["loc"]
    at = next((i for i, part in enumerate(place) if _is_form(part)), len(place))
    of_field = [error for error in errors if error["loc"][:at] == place[:at]]
    return max(of_field, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
