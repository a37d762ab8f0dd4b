"""contracts: completion text -> parsed fields and a verdict on the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from serve_apps.authoring.boxed import last_boxed
from serve_apps.authoring.json_text import json_object
from serve_apps.authoring.thinking import CLOSE, OPEN, after_thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Holds what a contract read from a completion."""

    fields: Mapping[str, str]
    """Every field of the contract, empty where the completion has none."""
    fault: str
    """The first thing that is wrong with the format; empty where nothing is."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The values that a contract for data read, not turned into text; empty for other contracts."""


class Contract(Protocol):
    """Describes the form that an agent's output must have."""

    def parse(self, text: str) -> Parsed:
        """Reads the fields and checks the format; never raises, whatever a model wrote."""
        ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names under which `Reply` offers the fields."""
        ...


@dataclass(frozen=True)
class Raw:
    """Takes the whole text as the one field `text`; only an empty completion is a fault."""

    def parse(self, text: str) -> Parsed:
        """Returns the text without space around it."""
        return Parsed(fields={"text": text.strip()}, fault="" if text.strip() else "empty completion")

    @property
    def field_names(self) -> tuple[str, ...]:
        """Returns `("text",)`: this contract parses nothing."""
        return ("text",)


@dataclass(frozen=True)
class Tags:
    """Requires exactly one non-empty `<NAME>...</NAME>` block per name, in this order, and nothing outside.

    A tag of the contract inside of a block is a fault: who reads the block would take it for another block. Fields are the lower-case names. Where the format is broken, blocks that can be read are still returned, because
    the next agent works with them; the credit rule punishes the fault.
    """

    names: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The values that a block may have: compared in lower case, and read as they are written here."""
    max_words: Mapping[str, int] = field(default_factory=dict)
    """The largest number of words that a block may have."""

    def __init__(
        self,
        *names: str,
        choices: Mapping[str, tuple[str, ...]] | None = None,
        max_words: Mapping[str, int] | None = None,
    ) -> None:
        unknown = ({*(choices or {})} | {*(max_words or {})}) - set(names)
        if not names or unknown:
            raise ValueError(f"Tags needs names, and choices and max_words only for them; unknown: {sorted(unknown)}")
        if texts := [name for name, values in (choices or {}).items() if isinstance(values, str)]:
            raise ValueError(f"Tags: choices of {texts[0]} are one text: give a tuple of the values that it may have")
        _fields(names)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "choices", dict(choices or {}))
        object.__setattr__(self, "max_words", dict(max_words or {}))

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names in lower case."""
        return _fields(self.names)

    def parse(self, text: str) -> Parsed:
        """Reads every block after a model's thoughts; the fault names the first bad one, thoughts are text outside."""
        fields: dict[str, str] = {}
        fault = ""
        reply = after_thinking(text, fields=self.field_names)
        tags = _tags_in(reply, self.names)
        spans: list[tuple[int, int]] = []
        for name in self.names:
            blocks = _blocks(tags, name)
            value = reply[blocks[-1].start : blocks[-1].stop].strip() if blocks else ""
            allowed = {choice.lower(): choice for choice in self.choices.get(name, ())}
            if allowed:
                value = allowed.get(value.lower(), value.lower())
            fields[name.lower()] = value
            if len(blocks) != 1:
                fault = fault or f"{len(blocks)} <{name}> blocks, expected 1"
            elif inside := blocks[0].first_tag_inside(tags):
                fault = fault or f"{inside} inside <{name}>"
            elif not value:
                fault = fault or f"<{name}> is empty"
            elif allowed and value not in allowed.values():
                fault = fault or f"<{name}> is {value[:40]!r}, expected one of {', '.join(allowed.values())}"
            elif len(value.split()) > self.max_words.get(name, len(value)):
                fault = fault or f"<{name}> has {len(value.split())} words, at most {self.max_words[name]} are allowed"
            spans += [(block.opened, block.closed) for block in blocks]
        rest = (text.removesuffix(reply) + _without(reply, spans)).strip()
        if not fault and rest:
            fault = f"text outside the tags: {rest[:40]!r}"
        if not fault and spans != sorted(spans):
            fault = f"tags out of order, expected {', '.join(self.names)}"
        return Parsed(fields=fields, fault=fault)


@dataclass(frozen=True)
class OneOf:
    """Requires exactly one of several tags, not empty, and nothing outside: an agent decides by which tag it writes.

    No tag of the contract may stand inside of the block. Every name is a field, empty but for the one that was written;
    `choice` names that one, empty where none was.
    """

    names: tuple[str, ...]
    may_be_empty: tuple[str, ...] = ()
    """Tags that need no text inside."""

    def __init__(self, *names: str, may_be_empty: Sequence[str] = ()) -> None:
        unknown = set(may_be_empty) - set(names)
        if len(names) < 2 or unknown:
            raise ValueError(
                f"OneOf needs two names or more, got {names}; may_be_empty only of them: {sorted(unknown)}"
            )
        _fields(names, "choice")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "may_be_empty", tuple(may_be_empty))

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names in lower case, and `choice`."""
        return _fields(self.names, "choice")

    def parse(self, text: str) -> Parsed:
        """Reads the first block after a model's thoughts; text outside of it, a second block included, is a fault."""
        reply = after_thinking(text, fields=self.field_names)
        tags = _tags_in(reply, self.names)
        fields = dict.fromkeys(self.field_names, "")
        written = {name: blocks[0] for name in self.names if (blocks := _blocks(tags, name, or_empty=True))}
        if not written:
            return Parsed(fields=fields, fault=f"none of {', '.join(f'<{name}>' for name in self.names)}")
        first = min(written, key=lambda name: written[name].opened)
        block = written[first]
        value = reply[block.start : block.stop].strip()
        fields |= {first.lower(): value, "choice": first.lower()}
        inside = block.first_tag_inside(tags)
        rest = (text.removesuffix(reply) + _without(reply, [(block.opened, block.closed)])).strip()
        fault = f"{inside} inside <{first}>" if inside else ""
        if rest:
            fault = fault or f"text outside <{first}>: {rest[:40]!r}"
        if not value and first not in self.may_be_empty:
            fault = fault or f"<{first}> is empty"
        return Parsed(fields=fields, fault=fault)


@dataclass(frozen=True)
class Thinking:
    """Requires one `<think>...</think>` block at the beginning, and applies a contract to the rest.

    The search agents of Dr. MAS (arXiv 2602.08847) write in this form.
    """

    contract: Contract
    is_begun: bool = False
    """Whether the prompt ends with the opening tag, as episodes find out: a completion need not repeat it."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the inner contract."""
        return self.contract.field_names

    def parse(self, text: str) -> Parsed:
        """Reads the text after the block; a missing block is a fault, and then the whole text is read, of a block that
        was cut nothing."""
        if self.is_begun and not text.lstrip().startswith(OPEN):
            text = OPEN + text
        reply = after_thinking(text, fields=self.contract.field_names)
        if not text.lstrip().startswith(OPEN) or text.count(OPEN) != 1 or text.count(CLOSE) != 1:
            fault = "no single <think> block at the beginning"
            return replace(self.contract.parse(reply), fault=fault)
        return self.contract.parse(reply)


@dataclass(frozen=True)
class Boxed:
    r"""An answer in `\boxed{}`, anywhere but in thoughts: fields `answer` (of the last box, or of several that are one answer) and `text`."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Returns `("answer", "text")`, the fields that every reply has."""
        return ("answer", "text")

    def parse(self, text: str) -> Parsed:
        """Reads the last complete box; it is a fault if there is none or it is empty."""
        boxed = (last_boxed(after_thinking(text)) or "").strip()
        fault = "" if boxed else r"no answer in \boxed{}"
        return Parsed(fields={"answer": boxed, "text": text.strip()}, fault=fault)


@dataclass(frozen=True)
class JsonKeys:
    """Requires one JSON object with these keys, fenced or bare. Fields are text, other values as JSON.

    `data` has the values.
    """

    names: tuple[str, ...]
    max_items: int | None = None
    """Of a longer list only so many items are read."""

    def __init__(self, *names: str, max_items: int | None = None) -> None:
        if not names:
            raise ValueError("JsonKeys needs names")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "max_items", max_items)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the keys."""
        return self.names

    def parse(self, text: str) -> Parsed:
        """Reads the object, after a model's thoughts; these and a missing or empty key are a fault, further keys are not."""
        fault, data = "", _json_in(text)
        if data is None:
            fault, data = "text outside the JSON object: thoughts", _json_in(after_thinking(text))
        if data is None:
            return Parsed(fields=dict.fromkeys(self.names, ""), fault="no JSON object")
        values = {name: self._value(data.get(name)) for name in self.names}
        missing = [name for name in self.names if values[name] in (None, "", [], {})]
        return Parsed(
            fields={name: "" if name in missing else _as_text(value) for name, value in values.items()},
            fault=f"key {missing[0]!r} is missing or empty" if missing else fault,
            data={name: value for name, value in values.items() if name not in missing},
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [item for item in value if item not in (None, "")][: self.max_items]
        return value.strip() if isinstance(value, str) else value


def _json_in(text: str) -> dict[str, Any] | None:
    bare = text.strip()
    if bare.startswith("```"):
        bare = bare.removeprefix("```").removeprefix("json")
    return json_object(bare.removesuffix("```"))


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a text: from `opened` to `closed` with its tags, from `start` to `stop` without them."""

    opened: int
    start: int
    stop: int
    closed: int

    def first_tag_inside(self, tags: Sequence[re.Match[str]]) -> str:
        """Returns the first tag of the contract that the block holds; empty where it holds none."""
        return next((tag[0][:40] for tag in tags if self.start <= tag.start() < self.stop), "")


def _fields(names: Sequence[str], *more: str) -> tuple[str, ...]:
    """Returns the fields of tags with these names, and `more`; ValueError where one would hide another."""
    fields = (*(name.lower() for name in names), *more)
    if twice := [field for field in fields if fields.count(field) > 1]:
        raise ValueError(f"a contract with the tags {', '.join(names)} has two fields {twice[0]!r}: rename a tag")
    return fields


def _tags_in(text: str, names: Sequence[str]) -> list[re.Match[str]]:
    """Finds the tags of every name in the order of the text, in linear time.

    Those are `<name>`, `</name>` and `<name/>`, and what others would read as such: with attributes, or space inside. The groups
    are a slash, the name, a slash.
    """
    return list(re.finditer(rf"<(?:\s*(/)\s*|\s*)({'|'.join(map(re.escape, names))})(?:\s[^<>]*?)?(/?)>", text))


def _blocks(tags: Sequence[re.Match[str]], name: str, *, or_empty: bool = False) -> list[_Block]:
    """Returns the blocks of `name`, each from an opening tag to the next closing one; `or_empty`: `<name/>` is one, too."""
    blocks = []
    opening: re.Match[str] | None = None
    for tag in tags:
        if tag[2] != name or tag[0] != f"<{tag[1] or ''}{name}{tag[3]}>":
            continue  # another tag, or one that is not written as the contract says
        if or_empty and tag[3] and not tag[1]:
            blocks.append(_Block(tag.start(), tag.end(), tag.end(), tag.end()))
        elif not tag[1] and not tag[3]:
            opening = opening or tag
        elif opening is not None and not tag[3]:
            blocks.append(_Block(opening.start(), opening.end(), tag.start(), tag.end()))
            opening = None
    return sorted(blocks, key=lambda block: block.opened)


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Returns the text without these parts of it, which do not overlap."""
    ends = [0, *(end for _, end in sorted(spans))]
    begins = [*(begin for begin, _ in sorted(spans)), len(text)]
    return "".join(text[end:begin] for end, begin in zip(ends, begins, strict=True))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
