"""redaction: a trace -> the same without what must not be kept; its token ids go where a text has changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from stores.types import Trace

T = TypeVar("T")

KEPT = (
    *("episode_id", "run_id", "team_key", "workflow", "group_id", "variant", "agent", "model_group", "tool", "caller"),
    *("trace_id", "key", "policy_versions", "cut", "parents"),
    *("prompt_token_ids", "completion_token_ids", "rollout_logprobs"),
)
"""Fields that name or number parts of Troupe, not what anybody wrote."""

DATA = ("response",)
"""Fields that hold JSON of any kind."""


class Redaction:
    """Patterns and what stands in their place."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = [(re.compile(pattern), replacement) for pattern, replacement in patterns.items()]

    def of(self, trace: Trace) -> Trace | None:
        """The trace without tokens and such text; None where it has none of it."""
        clean = self.clean(trace)
        if clean == trace:
            return None
        bare = {"prompt_token_ids": (), "completion_token_ids": (), "rollout_logprobs": ()}
        return replace(clean, turns=tuple(replace(turn, **bare) for turn in clean.turns))  # type: ignore[arg-type]

    def clean(self, value: T) -> T:
        """A record, or JSON values, with all text replaced that must not be kept."""
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._text(value)  # type: ignore[return-value]
        if is_dataclass(value) and not isinstance(value, type):
            given = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in KEPT}
            parts = {name: self._item(of) if name in DATA else self.clean(of) for name, of in given.items()}
            return replace(value, **parts)
        if isinstance(value, Mapping):
            return {self.clean(k): self._item(v) for k, v in value.items()}  # type: ignore[return-value]
        if isinstance(value, (list, tuple)):
            cleaned: Any = [self._item(v) for v in value]
            return type(value)(cleaned)
        return value

    def _item(self, value: Any) -> Any:
        """Of what somebody gave as JSON: a card's number may stand there as a number."""
        if isinstance(value, int) and not isinstance(value, bool):
            text = self._text(str(value))
            return value if text == str(value) else text
        return self.clean(value)

    def _text(self, text: str) -> str:
        for pattern, replacement in self._patterns:
            text = pattern.sub(replacement, text)
        return text
