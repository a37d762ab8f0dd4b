"""boxed: a text -> the answer in its last \\boxed{...}, or in the last ones where they are one answer, in linear time."""

from __future__ import annotations

import re
from typing import NamedTuple


class Box(NamedTuple):
    """Describes a box: `text[start:end]`, of which the first `num_opening` characters and the last one are its own."""

    start: int
    end: int
    num_opening: int


_BRACE = re.compile(r"\\(?:boxed|fbox)\{|\\\\(?!(?:boxed|fbox)\{)|\\[{}]|[{}]")
"""Braces, and what is none: a written one (`\\{`), of which `\\left\\{ ... \\right.` has one only, and the end of a row before a brace."""
_SPACE = r"(?:[\s$~]|\\[,;:! ()\[\]]|\\q?quad(?![a-zA-Z]))*+"
_AND = r"(?:and|or|\\text\{[\s,]*(?:and|or)\s*\})"
_BETWEEN = re.compile(
    rf"{_SPACE}(?:[,;]{_SPACE}{_AND}?|{_AND}){_SPACE}(?:[a-zA-Z](?:_\w|_\{{\w{{1,9}}\}})?{_SPACE}={_SPACE})?"
)
"""What stands between two boxes of one answer: `\\boxed{3} and \\boxed{5}`, `x = \\boxed{3}, y = \\boxed{5}`."""
_MAX_BETWEEN = 60
"""Characters between two boxes of one answer."""


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds, braces balanced; None if there is none.

    Boxes that only a comma, "and" or "or" separates are one answer, and listed: a text that states two values has not stated
    the last.
    """
    held = [text[box.start + box.num_opening : box.end - 1].strip() for box in last_boxes(text)]
    return ", ".join(dict.fromkeys(held)) if held else None


def last_boxes(text: str) -> list[Box]:
    r"""Returns where the boxes of the answer stated last stand: the last complete one, and those that belong to it."""
    last: Box | None = None
    closed: list[Box] = []
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0][-1] == "{" and brace[0] != "\\{":
            opened.append(brace)
        elif brace[0] != "}":
            continue
        elif opened and len((opening := opened.pop())[0]) > 1:
            closed.append(Box(opening.start(), brace.end(), len(opening[0])))
            last = closed[-1] if last is None or opening.start() > last.start else last
    if last is None:
        return []
    boxes = [last]
    for box in reversed(closed):
        if box.end > boxes[-1].start:
            continue
        between = text[box.end : boxes[-1].start]
        if len(between) > _MAX_BETWEEN or not _BETWEEN.fullmatch(between):
            break
        boxes.append(box)
    return boxes[::-1]
