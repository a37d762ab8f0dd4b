"""long_json: JSON text <-> values, with integers of any length, in linear time.

Python refuses to read or write an integer of more than 4,300 digits, since its own conversion takes quadratic time. Here
such an integer is a `Decimal`, which is exact, equal to the integer of the same value, and read and written in linear time.
"""

from __future__ import annotations

import json
from decimal import Context, Decimal
from typing import Any

MAX_INT_DIGITS = 4300
"""Digits of an integer that is an `int`; a longer one is a `Decimal`."""


def loads(text: str | bytes) -> Any:
    """Reads JSON text. Raises ValueError where it is none, RecursionError where it is nested too deeply."""
    return json.loads(text, parse_int=_integer)


def dumps(value: Any) -> str:
    """Writes a value as JSON text; raises TypeError for what JSON does not have."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):  # a long integer somewhere
        return _written(value)


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else Decimal(digits)


def _written(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_INT_DIGITS:
        return f"{Context(prec=10**9).create_decimal(value):f}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_written(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
