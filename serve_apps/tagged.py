"""tagged: a text, an opening and a closing tag -> the blocks between them, in linear time.

The regular expression `<a>(.*?)</a>` finds the same blocks, but reads the rest of the text again for every opening tag
that is never closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Describes one block: `text[start:end]` with its tags, `inner` without."""

    start: int
    end: int
    inner: str


def blocks(text: str, opening: str, closing: str) -> Iterator[Block]:
    """Yields from left to right what stands between an opening tag and the closing tag next to it."""
    at = 0
    while (start := text.find(opening, at)) >= 0:
        begin = start + len(opening)
        close = text.find(closing, begin)
        if close < 0:
            return  # no later opening tag is closed either
        at = close + len(closing)
        yield Block(start, at, text[begin:close])


def first_block(text: str, opening: str, closing: str) -> Block | None:
    """Returns the first of `blocks`; None where there is none."""
    return next(blocks(text, opening, closing), None)
