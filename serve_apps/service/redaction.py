"""redaction: a trace -> the same without what must not be kept; its token ids go where a text has changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from stores.types import Trace

T = TypeVar("T")

KEPT = ("episode_id", "run_id", "team_key", "workflow", "group_id", "variant", "agent", "model_group", "tool", "caller")
"""Fields that name parts of Troupe, not what anybody wrote."""


class Redaction:
    """Patterns and what stands in their place."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = [(re.compile(pattern), replacement) for pattern, replacement in patterns.items()]

    def of(self, trace: Trace) -> Trace | None:
        """The trace without tokens and such text; None where it has none of it."""
        clean = self._clean(trace)
        if clean == trace:
            return None
        bare = {"prompt_token_ids": (), "completion_token_ids": (), "rollout_logprobs": ()}
        return replace(clean, turns=tuple(replace(turn, **bare) for turn in clean.turns))  # type: ignore[arg-type]

    def _clean(self, value: T) -> T:
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._text(value)  # type: ignore[return-value]
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self._clean(getattr(value, f.name)) for f in fields(value) if f.name not in KEPT}
            return replace(value, **parts)
        if isinstance(value, Mapping):
            return {self._clean(k): self._clean(v) for k, v in value.items()}  # type: ignore[return-value]
        if isinstance(value, (list, tuple)):
            cleaned: Any = [self._clean(v) if not isinstance(v, (int, float)) else v for v in value]
            return type(value)(cleaned)
        return value

    def _text(self, text: str) -> str:
        for pattern, replacement in self._patterns:
            text = pattern.sub(replacement, text)
        return text
