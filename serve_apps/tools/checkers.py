"""checkers: what a program said, what was expected -> whether it is right. Runs outside the sandbox, on plain data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def is_right_output(expected: str, actual: str) -> bool:
    """Equal but for space at the ends of lines and of the text, for the case of yes and no, or in numbers by 1e-6.

    What is expected decides (seed-systems 1.1.5): the tolerance holds where it has a point or an exponent. An integer
    wants exactly its value, which may be spelled 3.0, so that no submission brings the tolerance along.
    """
    wanted, said = [_tokens(text) for text in (expected, actual)]
    if wanted == said:
        return True
    flat_wanted, flat_said = [[token for line in lines for token in line] for lines in (wanted, said)]
    if len(flat_wanted) != len(flat_said):
        return False
    return all(
        a == b or _is_same_word(a, b) or _is_same_number(a, b) for a, b in zip(flat_wanted, flat_said, strict=True)
    )


def has_same_tokens(expected: str, actual: str) -> bool:
    """Equal words in any order."""
    return Counter(expected.split()) == Counter(actual.split())


def is_right_value(expected: Any, actual: Any) -> bool:
    """Equal as JSON, by 1e-6 where a float is expected; `[x]` is taken for `x` where the tests wrap a single result."""
    return _is_equal(expected, actual) or (
        isinstance(expected, list) and len(expected) == 1 and _is_equal(expected[0], actual)
    )


OUTPUT_CHECKERS: dict[str, Callable[[str, str], bool]] = {
    "standard": is_right_output,
    "unordered_tokens": has_same_tokens,
}


def _tokens(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _is_same_word(wanted: str, said: str) -> bool:
    return wanted.lower() in ("yes", "no") and wanted.lower() == said.lower()


def _is_same_number(wanted: str, said: str) -> bool:
    if not _DECIMAL.fullmatch(wanted) or not _DECIMAL.fullmatch(said):
        return False
    if not wanted.lstrip("+-").isdigit():
        return math.isfinite(float(wanted)) and _is_close(float(wanted), float(said))
    if said.lstrip("+-").isdigit() or not _INTEGER.fullmatch(wanted):  # 007 and 7 are words
        return False
    try:
        return Decimal(wanted) == Decimal(said)
    except InvalidOperation:  # an exponent of more than 18 digits
        return False


def _is_close(wanted: float, said: float) -> bool:
    try:
        return math.isclose(wanted, said, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an int beyond all floats
        return False


def _is_equal(wanted: Any, said: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(said, bool):
        return wanted is said
    if isinstance(wanted, (int, float)) and isinstance(said, (int, float)):
        return _is_close(wanted, said) if isinstance(wanted, float) else wanted == said
    if isinstance(wanted, list) and isinstance(said, list):
        return len(wanted) == len(said) and all(map(_is_equal, wanted, said))
    if isinstance(wanted, dict) and isinstance(said, dict):
        return wanted.keys() == said.keys() and all(_is_equal(value, said[key]) for key, value in wanted.items())
    return type(wanted) is type(said) and wanted == said
