"""conventions: what free forms in traces mean: a turn's constraint, calls of worlds, names of variants; rounds, and words of texts.

Sampling.constraint   {"allowed_token_ids": [...]}: one of these tokens had to be sampled
ToolCall.request      {"world": its number, "reset": its settings} or {"world": ..., "step": the action}: a call of a world
Trace.variant         greedy    counterfactual-3 (turn 3)    without-solver (an agent)    counterfactual-3#1 (the second sibling)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stores.types import ToolCall, Trace, Turn

ALLOWED_TOKENS = "allowed_token_ids"
UNRECORDED = "unrecorded_characters"
"""What stands in the record of a world instead of an `info` that is too long: its length."""
_WORD = re.compile(r"\w+|[^\w\s]")
WORLD_CALLS = ({"world", "reset"}, {"world", "step"})


def constraint_of(token_ids: Iterable[int]) -> str:
    """Returns the constraint of a completion that is one of these tokens."""
    return json.dumps({ALLOWED_TOKENS: list(token_ids)})


def allowed_tokens(constraint: str) -> list[int]:
    """Returns the tokens of such a constraint, in its order; empty for any other constraint, and for none."""
    ids: list[int] = json.loads(constraint).get(ALLOWED_TOKENS, []) if constraint else []
    return ids


def rounds_in_time(turns: Sequence[Turn]) -> dict[int, int]:
    """Returns turn index -> round, from 0: a round is over when one of its agents acts again.

    `Turn.round_index` will not do: it counts each agent's own calls, and an agent that acts once, at the end, would be in
    the first round.
    """
    round_of: dict[int, int] = {}
    number, acted = 0, set[str]()
    for turn in sorted(turns, key=lambda turn: turn.turn_index):
        if turn.agent in acted:
            number, acted = number + 1, set()
        acted.add(turn.agent)
        round_of[turn.turn_index] = number
    return round_of


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantName:
    """Names a variant; `str` gives the text that is part of the episode's key."""

    kind: str
    """`greedy`, `counterfactual` or `without`."""
    changed: str = ""
    """The index of the turn that is sampled anew, or the agent that is left out; empty where all turns are others."""
    sibling: int = 0
    """Which of the replays with the same change it is."""

    def __str__(self) -> str:
        """Returns the name; that of the first sibling has no number."""
        name = f"{self.kind}-{self.changed}" if self.changed else self.kind
        return f"{name}#{self.sibling}" if self.sibling else name

    @classmethod
    def parse(cls, name: str) -> VariantName:
        """Reads what `str` gives."""
        match = re.fullmatch(r"([^-#]*)(?:-(.*?))?(?:#(\d+))?", name, re.DOTALL)
        assert match is not None, "every part may be missing"
        return cls(kind=match[1], changed=match[2] or "", sibling=int(match[3] or 0))


def is_world_call(call: ToolCall) -> bool:
    """Whether a call began a world or acted in one."""
    return call.request.keys() in WORLD_CALLS


def num_world_calls(trace: Trace) -> int:
    """Counts the calls of an episode that began a world or acted in one."""
    return sum(map(is_world_call, trace.tool_calls))


def num_world_steps(trace: Trace) -> int:
    """Counts the actions of an episode in its worlds."""
    return sum(is_world_call(call) and "step" in call.request for call in trace.tool_calls)


def info_of(call: ToolCall) -> Mapping[str, Any]:
    """Returns the `info` of a world event that was answered; ValueError where it was too long to be recorded."""
    info: Mapping[str, Any] = call.response["info"]
    if UNRECORDED in info:
        raise ValueError(
            f"event {call.call_index} of the world {call.tool!r}: its info of {info[UNRECORDED]} characters is not recorded, and the "
            "credit rule reads it: raise max_info of the Environment, or say less"
        )
    return info


def anchor_before(trace: Trace, turn_index: int) -> str:
    """Returns the anchor of the state that a turn acted in: of the newest world event before it; empty where there is none."""
    events = [c for c in trace.tool_calls if c.call_index < turn_index and c.response is not None and is_world_call(c)]
    return str(max(events, key=lambda call: call.call_index).response["anchor"]) if events else ""


def word_grams(text: str) -> list[str]:
    """Returns the words and punctuation marks of a text, and the pairs of neighbouring ones."""
    words = _WORD.findall(text)
    return [*words, *(f"{a} {b}" for a, b in pairwise(words))]
