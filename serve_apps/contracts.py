"""contracts: completion text -> parsed fields and a verdict on the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a contract read from a completion."""

    fields: Mapping[str, str]
    """Every field of the contract; empty where it was not found."""
    fault: str
    """What the format missed, empty where it is ok."""


class Contract(Protocol):
    """The form an agent's output must have."""

    def parse(self, text: str) -> Parsed:
        """Fields and verdict; never raises on what a model wrote."""
        ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names under which `Reply` offers the fields."""
        ...


@dataclass(frozen=True)
class Raw:
    """The whole text is the one field `text`; only an empty completion is a fault."""

    def parse(self, text: str) -> Parsed:
        """The stripped text."""
        return Parsed(fields={"text": text.strip()}, fault="" if text.strip() else "empty completion")

    @property
    def field_names(self) -> tuple[str, ...]:
        """Always `("text",)`."""
        return ("text",)


@dataclass(frozen=True)
class Tags:
    """Exactly one non-empty `<NAME>...</NAME>` block per name, in this order, and nothing outside.

    Fields are the lower-case names. Where the format is broken, blocks that can be read are still offered, because
    the next agent works with what there is; the verdict is what the credit rule punishes.
    """

    names: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values a block may have, compared in lower case."""

    def __init__(self, *names: str, choices: Mapping[str, tuple[str, ...]] | None = None) -> None:
        unknown = set(choices or {}) - set(names)
        if not names or unknown:
            raise ValueError(f"Tags needs names, and choices only for them; unknown: {sorted(unknown)}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "choices", dict(choices or {}))

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names in lower case."""
        return tuple(name.lower() for name in self.names)

    def parse(self, text: str) -> Parsed:
        """Reads every block and says what is wrong with the first bad one."""
        fields: dict[str, str] = {}
        fault = ""
        rest = text
        for name in self.names:
            blocks = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
            value = blocks[-1].strip() if blocks else ""
            allowed = self.choices.get(name)
            if allowed:
                value = value.lower()
            fields[name.lower()] = value
            if len(blocks) != 1:
                fault = fault or f"{len(blocks)} <{name}> blocks, expected 1"
            elif not value:
                fault = fault or f"<{name}> is empty"
            elif allowed and value not in allowed:
                fault = fault or f"<{name}> is {value[:40]!r}, expected one of {', '.join(allowed)}"
            rest = re.sub(rf"<{name}>.*?</{name}>", "", rest, count=1, flags=re.DOTALL)
        if not fault and rest.strip():
            fault = f"text outside the tags: {rest.strip()[:40]!r}"
        starts = [text.find(f"<{name}>") for name in self.names]
        if not fault and starts != sorted(starts):
            fault = f"tags out of order, expected {', '.join(self.names)}"
        return Parsed(fields=fields, fault=fault)
