"""boxed: a text -> the last \\boxed{...} in it."""

from __future__ import annotations

import re

_BRACE = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds, braces balanced; None if there is none."""
    last, answer = -1, None
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            box = opened.pop()
            if len(box[0]) > 1 and box.start() > last:
                last, answer = box.start(), text[box.end() : brace.start()]
    return answer
