"""checkers: a program's output, the expected one -> whether it is right. They run outside the sandbox, on plain data.

They take time in proportion to the output, whatever a program writes: no deadline holds here.
"""

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
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def is_right_output(expected: str, actual: str) -> bool:
    """Returns whether outputs are equal but for space around lines, the case of yes and no, and 1e-6 in numbers.

    The expected number decides (UnityMAS-O, arXiv 2605.26646): the tolerance holds where it has a point or an exponent. For
    an integer exactly its value is right, which may be spelled 3.0, so that no submission can choose the tolerance.
    """
    expected_lines, actual_lines = [_tokens(text) for text in (expected, actual)]
    if expected_lines == actual_lines:
        return True
    expected_tokens, actual_tokens = [
        [token for line in lines for token in line] for lines in (expected_lines, actual_lines)
    ]
    if len(expected_tokens) != len(actual_tokens):
        return False
    return all(
        a == b or _is_same_word(a, b) or _is_same_number(a, b)
        for a, b in zip(expected_tokens, actual_tokens, strict=True)
    )


def has_same_tokens(expected: str, actual: str) -> bool:
    """Returns whether both have the same words, in any order."""
    return Counter(expected.split()) == Counter(actual.split())


def is_right_value(expected: Any, actual: Any) -> bool:
    """Returns whether values are equal as JSON (`long_json.loads`), by 1e-6 where a float is expected.

    Where `[x]` is expected `x` is right, too.
    """
    return _is_equal(expected, actual) or (
        isinstance(expected, list) and len(expected) == 1 and _is_equal(expected[0], actual)
    )


OUTPUT_CHECKERS: dict[str, Callable[[str, str], bool]] = {
    "standard": is_right_output,
    "unordered_tokens": has_same_tokens,
}


def _tokens(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _is_same_word(expected: str, actual: str) -> bool:
    return expected.lower() in ("yes", "no") and expected.lower() == actual.lower()


def _is_same_number(expected: str, actual: str) -> bool:
    if not _DECIMAL.fullmatch(expected) or not _DECIMAL.fullmatch(actual):
        return False
    if not expected.lstrip("+-").isdigit():
        return math.isfinite(float(expected)) and _is_close(float(expected), float(actual))
    if actual.lstrip("+-").isdigit() or not _INTEGER.fullmatch(expected):  # 007 and 7 are words
        return False
    try:
        return Decimal(expected) == Decimal(actual)
    except InvalidOperation:  # an exponent of more than 18 digits
        return False


def _is_close(expected: float, actual: float) -> bool:
    try:
        return math.isclose(expected, actual, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an int beyond all floats
        return False


def _is_equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, (int, float, Decimal)) and isinstance(actual, (int, float, Decimal)):
        if not isinstance(expected, float):
            return expected == actual
        return not isinstance(actual, Decimal) and _is_close(expected, actual)  # a long integer, beyond all floats
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_is_equal, expected, actual))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            _is_equal(value, actual[key]) for key, value in expected.items()
        )
    return type(expected) is type(actual) and expected == actual
