"""prompt_budget: an agent's inputs and a number of tokens -> a prompt that fits, and what was cut from it.

Only inputs that the agent names in `cut` lose text, in that order; instructions never do. A text keeps its beginning
and its end: the middle is cut, and the end, which is newer, keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_apps.authoring.agent import Agent, TracedText, origins_of

MARK = " [...] "
HEAD_SHARE = 0.25

Messages = list[dict[str, str]]


def fit_prompt(
    agent: Agent, inputs: Mapping[str, Any], *, encode: Callable[[Messages], Sequence[int]], room: int
) -> tuple[Messages, list[int], dict[str, int]]:
    """Returns the messages, their token ids, and the number of characters cut per input.

    Args:
        agent: its templates, and which inputs may be cut.
        inputs: what the templates are filled with.
        encode: messages -> token ids, as the model will see them.
        room: tokens that the prompt may have. It has more where nothing is left to cut, and the caller has to stop.
    """
    fitted = dict(inputs)
    messages = agent.messages(fitted)
    token_ids = list(encode(messages))
    cut: dict[str, int] = {}
    for name in agent.cut:
        if len(token_ids) <= room:
            break
        value = fitted[name]  # a template takes what is no text, too: a list of notes
        full = value if isinstance(value, str) else TracedText.by(str(value), *origins_of(value))

        def fits(num_kept: int, name: str = name, full: str = full) -> bool:
            return len(encode(agent.messages({**fitted, name: shorten(full, num_kept)}))) <= room

        num_kept = _largest(fits, len(full))
        fitted[name] = shorten(full, num_kept)
        if num_kept < len(full):
            cut[name] = len(full) - num_kept
        messages = agent.messages(fitted)
        token_ids = list(encode(messages))
    return messages, token_ids, cut


def shorten(text: str, num_kept: int) -> str:
    """Returns `num_kept` characters of a text, from its two ends."""
    if num_kept >= len(text):
        return text
    if num_kept <= 0:
        return ""
    head = int(num_kept * HEAD_SHARE)
    return TracedText.by(text[:head] + MARK + text[len(text) - (num_kept - head) :], *origins_of(text))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` that fits, by bisection; 0 if none does."""
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
