"""boxed: a text -> the last \\boxed{...} in it, in linear time."""

from __future__ import annotations

import re
from typing import NamedTuple


class Box(NamedTuple):
    """Describes a box: `text[start:end]`, of which the first `num_opening` characters and the last one are its own."""

    start: int
    end: int
    num_opening: int


_BRACE = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds, braces balanced; None if there is none."""
    box = last_box(text)
    return None if box is None else text[box.start + box.num_opening : box.end - 1]


def last_box(text: str) -> Box | None:
    r"""Returns where the last complete `\boxed{...}` stands, braces balanced; None if there is none."""
    last: Box | None = None
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            box = opened.pop()
            if len(box[0]) > 1 and (last is None or box.start() > last.start):
                last = Box(box.start(), brace.end(), len(box[0]))
    return last
