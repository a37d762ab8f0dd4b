"""json_text: what a model wrote -> the JSON object that it is. NaN, Infinity and numbers beyond a float, which Python reads, are no JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any


def json_object(text: str) -> dict[str, Any] | None:
    """Returns the object; None where the text is none, is nested too deeply, has an integer of more digits than Python reads or half of
    a surrogate pair, which no tokenizer takes."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number
