"""texts: prompts, answers, arguments and results of tools -> the JSON that spans hold of them, cut to a bounded length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TEXT = 16_384
"""Characters of the texts in one attribute of a span. Of a longer text the end stands there: the last message of a prompt."""


def clipped(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text, or the end of a long one."""
    return text if len(text) <= limit else f"[...]{text[-limit:]}"


def as_json(value: Any) -> str:
    """Returns arguments or a result as JSON, or its end; what JSON does not have is written as Python writes it."""
    return clipped(json.dumps(value, ensure_ascii=False, default=repr))


def messages(role: str, texts: Sequence[str], finish_reasons: Sequence[str] = ()) -> str:
    """Returns one message per text in the form of `gen_ai.input.messages` and `gen_ai.output.messages`."""
    limit = MAX_TEXT // max(1, len(texts))
    listed: list[Mapping[str, Any]] = [
        {"role": role, "parts": [{"type": "text", "content": clipped(text, limit)}]} for text in texts
    ]
    if finish_reasons:
        listed = [{**m, "finish_reason": reason} for m, reason in zip(listed, finish_reasons, strict=True)]
    return json.dumps(listed, ensure_ascii=False)
