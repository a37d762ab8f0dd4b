"""settings: the strict base class of every config section, and the marks that say which fields identify a run.

Pydantic only. The string under a field is its description, in the JSON schema and in the generated reference.
"""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

NOT_IDENTITY: JsonDict = {"identity": False}
"""For `Field(json_schema_extra=...)`: a change of this field leaves the run the same run."""
IDENTITY_IF_CHANGED: JsonDict = {"identity": "if_changed"}
"""The same: this field counts only away from its default, under which it does nothing. Runs from before the field go on."""


AGENTS: ContextVar[Collection[str]] = ContextVar("agents", default=())
"""The agents of the run whose settings are checked; empty: they are not known."""


def _is_agent(name: str) -> str:
    agents = AGENTS.get()
    if agents and name not in agents:
        raise ValueError(f"{name!r} is no agent of this run, which has {', '.join(agents)}")
    return name


AgentName = Annotated[str, AfterValidator(_is_agent)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
"""Annotations of constructors whose settings stand in a config: `by_name.check_settings` holds their bounds."""


class Settings(BaseModel):
    """A config section: it is frozen, it refuses unknown keys and infinite numbers, and each field is described by the string under it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def identity(settings: BaseModel) -> dict[str, Any]:
    """Returns the JSON values of the fields that identify a run, section by section."""
    return _identity(settings, settings.model_dump(mode="json"))


def identifies(field: FieldInfo, value: Any) -> bool:
    """Returns whether a field with this value is part of what identifies a run."""
    marks = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    mark = marks.get("identity", True)
    return bool(mark) if mark != "if_changed" else value != field.get_default(call_default_factory=True)


def _identity(value: Any, dumped: Any) -> Any:
    """Returns `dumped` without what does not identify a run; `value` is what it was dumped from."""
    if isinstance(value, BaseModel):
        named = {
            name: _identity(getattr(value, name), dumped[name])
            for name, field in type(value).model_fields.items()
            if identifies(field, getattr(value, name))
        }
        return named | {name: dumped[name] for name in value.model_extra or ()}
    if isinstance(value, dict):  # in JSON the keys are texts, in the same order
        return {key: _identity(part, dumped[key]) for key, part in zip(dumped, value.values(), strict=True)}
    return dumped
