"""plain_signs: a text as people and models type it -> the same in the signs of a keyboard, so that two spellings compare as equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import decomposition, normalize

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff™®©℠]")
"""Soft hyphens, spaces of no width, marks of direction, variants of a glyph, and what owners put behind a name."""
_THOUSANDS = re.compile("(?<=\\d)(?<!\\d{4})[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
"""A space that does not break a line, before three digits."""
_VULGAR = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞])")
_LETTERS_AND_MARKS = "".join(map(chr, range(0x2C7E)))
"""The part of Unicode that has raised and lowered characters."""
_RAISED_SIGNS, _LOWERED_SIGNS = (
    "".join(sign for sign in _LETTERS_AND_MARKS if sign not in "ªº℠™" and decomposition(sign).startswith(kind))
    for kind in ("<super>", "<sub>")
)
"""Signs of which NFKC makes plain digits and letters, but for ordinals and what owners put behind a name."""
_RAISED = re.compile(f"([{_RAISED_SIGNS}]+)(\\w?)")
_LOWERED = re.compile(f"([{_LOWERED_SIGNS}]+)(\\w?)")
_LONG_DASH = re.compile("(?<=\\d)[—―](?=\\d)")
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛ʹʻʼ′", "'"),
        **dict.fromkeys("‐‒–−⁃➖", "-"),
        **dict.fromkeys("⁄∕", "/"),
        "―": "—",
        "∶": ":",
        "。": ".",
        "、": ",",
    }
)


def in_plain_signs(text: str) -> str:
    """Returns a text in Unicode's form NFKC, with apostrophes, hyphens, minus signs, fractions and powers as ASCII has them.

    `½` is `1/2` and `1½` is `1 1/2`; `x²` is `x^2` and `52₈` is `52_8`, which NFKC alone takes for `x2` and `528`. A dash as
    long as an em is a hyphen between digits, and stays a dash elsewhere.
    """
    text = _INVISIBLE.sub("", text.replace("´", "'"))  # NFKC would make a space and an accent of it
    if text.isascii():
        return text
    text = _VULGAR.sub(" ", _THOUSANDS.sub(",", text))
    text = _LOWERED.sub(_after("_"), _RAISED.sub(_after("^"), text))
    return _LONG_DASH.sub("-", normalize("NFKC", text)).translate(_SIGNS)


def _after(mark: str) -> Callable[[re.Match[str]], str]:
    def written(run: re.Match[str]) -> str:
        digits, following = run.groups()
        return f"{mark}{{{digits}}}{following}" if len(digits) > 1 or following else f"{mark}{digits}"

    return written
