"""thinking: what a reasoning model wrote -> what it says outside of its thoughts."""

from __future__ import annotations

import re
from collections.abc import Collection

OPEN, CLOSE = "<think>", "</think>"

_TAG = re.compile(
    r"<(/?)(think|thinking|thoughts?|reasoning|seed:think)>|◁(/?)think▷|(?-i:\[(/?)THINK\])|<\|(?:begin|(end))_of_thought\|>",
    re.IGNORECASE,
)
"""The tags of thoughts that models and prompts have, in any case."""


def after_thinking(text: str, *, fields: Collection[str] = ()) -> str:
    """Returns what follows the last thoughts, or stands before them if nothing follows; all of a text without their tags.

    It is empty where thoughts were cut. A template may have written the opening tag into the prompt, so that a completion
    has the closing one alone. `fields` are names in lower case that mark something else in this text, as a contract's do.
    """
    tags = [tag for tag in _TAG.finditer(text) if (tag[2] or "").lower() not in fields]
    end, is_closed = len(text), False
    for tag in reversed(tags):
        is_closing = bool(tag[1] or tag[3] or tag[4] or tag[5])
        if not is_closing and not is_closed:
            return ""
        if is_closing and not is_closed and (said := text[tag.end() : end]).strip():
            return said
        is_closed = is_closing
        end = tag.start()
    return "" if is_closed else text[:end]
