"""contracts: completion text -> parsed fields and a verdict on the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from serve_apps.boxed import last_boxed


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a contract read from a completion."""

    fields: Mapping[str, str]
    """Every field of the contract; empty where it was not found."""
    fault: str
    """What the format missed, empty where it is ok."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Of a contract that reads data: what was found, as it is and not as text."""


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
    max_words: Mapping[str, int] = field(default_factory=dict)
    """How many words a block may have."""

    def __init__(
        self,
        *names: str,
        choices: Mapping[str, tuple[str, ...]] | None = None,
        max_words: Mapping[str, int] | None = None,
    ) -> None:
        unknown = ({*(choices or {})} | {*(max_words or {})}) - set(names)
        if not names or unknown:
            raise ValueError(f"Tags needs names, and choices and max_words only for them; unknown: {sorted(unknown)}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "choices", dict(choices or {}))
        object.__setattr__(self, "max_words", dict(max_words or {}))

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
            elif len(value.split()) > self.max_words.get(name, len(value)):
                fault = fault or f"<{name}> has {len(value.split())} words, at most {self.max_words[name]} are allowed"
            rest = re.sub(rf"<{name}>.*?</{name}>", "", rest, count=1, flags=re.DOTALL)
        if not fault and rest.strip():
            fault = f"text outside the tags: {rest.strip()[:40]!r}"
        starts = [text.find(f"<{name}>") for name in self.names]
        if not fault and starts != sorted(starts):
            fault = f"tags out of order, expected {', '.join(self.names)}"
        return Parsed(fields=fields, fault=fault)


@dataclass(frozen=True)
class OneOf:
    """Exactly one of several tags, not empty, and nothing outside: what an agent decides by which tag it writes.

    Every name is a field, empty but for the one that was written; `choice` names that one, empty where none was.
    """

    names: tuple[str, ...]
    may_be_empty: tuple[str, ...] = ()
    """Tags that say all by being there."""

    def __init__(self, *names: str, may_be_empty: Sequence[str] = ()) -> None:
        unknown = set(may_be_empty) - set(names)
        if len(names) < 2 or unknown:
            raise ValueError(
                f"OneOf needs two names or more, got {names}; may_be_empty only of them: {sorted(unknown)}"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "may_be_empty", tuple(may_be_empty))

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names in lower case, and `choice`."""
        return (*(name.lower() for name in self.names), "choice")

    def parse(self, text: str) -> Parsed:
        """The first tag that can be read decides; more than one is a fault."""
        found = [name for name in self.names if re.search(rf"<{name}>.*?</{name}>|<{name}/>", text, re.DOTALL)]
        fields = dict.fromkeys(self.field_names, "")
        if not found:
            return Parsed(fields=fields, fault=f"none of {', '.join(f'<{name}>' for name in self.names)}")
        first = min(found, key=lambda name: text.find(f"<{name}"))
        match = re.search(rf"<{first}>(.*?)</{first}>|<{first}/>", text, re.DOTALL)
        assert match is not None, "it was found above"
        value = (match[1] or "").strip()
        fields |= {first.lower(): value, "choice": first.lower()}
        rest = text[: match.start()] + text[match.end() :]
        fault = f"text outside <{first}>: {rest.strip()[:40]!r}" if rest.strip() else ""
        if not value and first not in self.may_be_empty:
            fault = fault or f"<{first}> is empty"
        return Parsed(fields=fields, fault=fault)


@dataclass(frozen=True)
class Thinking:
    """A contract behind one `<think>...</think>` block, with which the text begins (Dr. MAS' search agents)."""

    contract: Contract

    @property
    def field_names(self) -> tuple[str, ...]:
        """Those of the contract inside."""
        return self.contract.field_names

    def parse(self, text: str) -> Parsed:
        """What follows the thoughts; the whole text where there are none, which is a fault."""
        match = re.fullmatch(r"\s*<think>(?:(?!</?think>).)*</think>(.*)", text, re.DOTALL)
        if match is None or "<think>" in match[1] or "</think>" in match[1]:
            _, _, rest = text.rpartition("</think>")
            return replace(self.contract.parse(rest), fault="no single <think> block at the beginning")
        return self.contract.parse(match[1])


@dataclass(frozen=True)
class Boxed:
    r"""An answer in `\boxed{}`, anywhere: fields `answer` (of the last box) and `text`."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Always `("answer", "text")`."""
        return ("answer", "text")

    def parse(self, text: str) -> Parsed:
        """The last complete box; none, or an empty one, is a fault."""
        boxed = (last_boxed(text) or "").strip()
        fault = "" if boxed else r"no answer in \boxed{}"
        return Parsed(fields={"answer": boxed, "text": text.strip()}, fault=fault)


@dataclass(frozen=True)
class JsonKeys:
    """One JSON object with these keys, fenced or bare. Fields are text, JSON where it was none; `data` has the values."""

    names: tuple[str, ...]
    max_items: int | None = None
    """Of lists: the first so many count."""

    def __init__(self, *names: str, max_items: int | None = None) -> None:
        if not names:
            raise ValueError("JsonKeys needs names")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "max_items", max_items)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The keys."""
        return self.names

    def parse(self, text: str) -> Parsed:
        """Reads the object; a missing or empty key is a fault, further keys are not."""
        bare = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
        try:
            data: Any = json.loads(bare)
        except (json.JSONDecodeError, RecursionError):
            data = None
        if not isinstance(data, Mapping):
            return Parsed(fields=dict.fromkeys(self.names, ""), fault="no JSON object")
        found = {name: self._value(data.get(name)) for name in self.names}
        missing = [name for name in self.names if found[name] in (None, "", [], {})]
        return Parsed(
            fields={name: "" if name in missing else _as_text(value) for name, value in found.items()},
            fault=f"key {missing[0]!r} is missing or empty" if missing else "",
            data={name: value for name, value in found.items() if name not in missing},
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [item for item in value if item not in (None, "")][: self.max_items]
        return value.strip() if isinstance(value, str) else value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
