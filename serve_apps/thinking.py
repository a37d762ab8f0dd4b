"""thinking: what a reasoning model wrote -> what it says after its thoughts."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def after_thinking(text: str) -> str:
    """Returns what follows the last `</think>`, all of a text without such tags, and nothing where thoughts were cut.

    A template may have written the opening tag into the prompt, so that a completion has the closing one alone.
    """
    said = text.rpartition(CLOSE)[2]
    return "" if OPEN in said else said
