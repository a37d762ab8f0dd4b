"""cells: the value of a table's cell -> what it holds: JSON text, numbers as people write them, parts of objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from serve_apps.chat import long_json

MAX_PLACES = 20
"""Numbers with more places before or after the point are written with an exponent."""


def data_of(value: Any) -> Any:
    """Returns the content of a text that is JSON; else the value itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return long_json.loads(value)
    except (ValueError, RecursionError):
        return value


def look_up(row: Mapping[str, Any], dotted: str) -> Any:
    """Returns what stands under a dotted name, also within JSON text; None where there is nothing."""
    value: Any = row
    for part in dotted.split("."):
        value = data_of(value)
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_finite(value: float | Decimal) -> bool:
    """Returns whether a number is finite; a `Decimal` may be, and be larger than any float."""
    return value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)


def written(value: Any) -> str:
    """Returns a value as people write it: a number that a table holds as 72.0, because others in its column are none, is 72."""
    if isinstance(value, bool) or not isinstance(value, (float, Decimal)) or not is_finite(value):
        return str(value)
    exact = Decimal(repr(value)) if isinstance(value, float) else value
    if exact and not -MAX_PLACES < exact.adjusted() < MAX_PLACES:
        return str(value)
    plain = f"{exact:f}" if exact else "0"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
