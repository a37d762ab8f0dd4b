"""redaction: a trace -> the same without text that must not be stored; where text changes, all token ids are removed.

The patterns are an operator's, the texts a caller's. Many a pattern takes quadratic time on a text that is made for it
(`[\\w.]+@` on dots alone), and callers of one gateway share its processor: so redaction of a trace has a limit of time,
and what could not be read until then is replaced as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import count
from typing import Any, TypeVar

import regex

from stores.traces.rows import as_stored
from stores.types import Trace

T = TypeVar("T")

UNCHANGED_FIELDS = (
    *("episode_id", "run_id", "team_key", "workflow", "group_id", "variant", "agent", "model_group", "tool", "caller"),
    *("trace_id", "task_id", "source", "key", "policy_versions", "cut", "parents"),
    *("prompt_token_ids", "completion_token_ids", "rollout_logprobs"),
)
"""Fields that name or number parts of Troupe and hold no text of anybody."""

LIMIT_S = 1.0
"""Seconds for all texts of a trace."""
SHORTEST_S = 0.001
"""Seconds for a text after that, enough for a short one."""
NOT_READ = "[removed: too long or too deep to be redacted]"

JSON_FIELDS = ("response",)
"""Fields that hold JSON of any kind, beside those that are mappings."""


class Redaction:
    """Replaces what matches a set of patterns."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        """Args: patterns: regular expression -> replacement."""
        self._patterns = [(regex.compile(pattern), replacement) for pattern, replacement in patterns.items()]

    def redact(self, trace: Trace) -> Trace | None:
        """Returns the trace without matching text and without tokens; None where nothing matches.

        The tokens go because they spell out the text that was replaced.
        """
        if not self._patterns:
            return None
        clean = self.clean(trace)
        if clean == trace:
            return None
        no_tokens = {"prompt_token_ids": (), "completion_token_ids": (), "rollout_logprobs": ()}
        return replace(clean, turns=tuple(replace(turn, **no_tokens) for turn in clean.turns))  # type: ignore[arg-type]

    def clean(self, value: T) -> T:
        """Returns a record, or JSON values, with all matching text replaced, and all that takes longer than `LIMIT_S`."""
        return _Cleaning(self._patterns, time.monotonic() + LIMIT_S).clean(value)


class _Cleaning:
    """Cleans one record until a deadline."""

    def __init__(self, patterns: Sequence[tuple[Any, str]], deadline: float) -> None:
        self._patterns, self._deadline = patterns, deadline

    def clean(self, value: T) -> T:
        """Returns a record, or JSON values, with all matching text replaced."""
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._clean_text(value)  # type: ignore[return-value]
        if is_dataclass(value) and not isinstance(value, type):
            texts = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in UNCHANGED_FIELDS}
            cleaned_fields = {
                name: self._clean_stored(part) if name in JSON_FIELDS or isinstance(part, Mapping) else self.clean(part)
                for name, part in texts.items()
            }
            return replace(value, **cleaned_fields)
        if isinstance(value, Mapping):
            cleaned: dict[Any, Any] = {}
            for key, part in value.items():
                cleaned[_free(self.clean(key), cleaned)] = self._clean_json(part)
            return cleaned  # type: ignore[return-value]
        if isinstance(value, (list, tuple)):
            kind = tuple if isinstance(value, tuple) else list  # a NamedTuple does not take one iterable
            cleaned_items: Any = kind(self._clean_json(v) for v in value)
            return cleaned_items
        return value

    def _clean_stored(self, value: Any) -> Any:
        """Cleans a field of any JSON as it will be stored: of an object that JSON does not have, a store writes the text that it shows."""
        stored = as_stored(value)
        cleaned = self._clean_json(stored)
        return value if cleaned == stored else cleaned

    def _clean_json(self, value: Any) -> Any:
        """Cleans a value that somebody sent as JSON, in which e.g. a card number may be a number instead of a text."""
        if isinstance(value, int) and not isinstance(value, bool):
            text = self._clean_text(str(value))
            return value if text == str(value) else text
        try:
            return self.clean(value)
        except RecursionError:  # one value that is nested too deep must not lose the episodes that are written with it
            return NOT_READ

    def _clean_text(self, text: str) -> str:
        for pattern, replacement in self._patterns:
            try:
                left = max(self._deadline - time.monotonic(), SHORTEST_S)
                text = pattern.sub(replacement, text, timeout=left)
            except TimeoutError:
                return NOT_READ
        return text


def _free(key: Any, taken: Collection[Any]) -> Any:
    """Returns a key, numbered where another one has become equal to it: what stands under either is kept."""
    return next(k for number in count(1) if (k := key if number == 1 else f"{key} {number}") not in taken)
