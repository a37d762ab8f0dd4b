"""credit: a reward that differs between the episodes of a group, so that every row of a benchmark trains."""

from __future__ import annotations

from typing import Literal

from pipelines.credit.rule import Credit, turn_reward
from stores.types import Trace


class LetterShare:
    """Every turn earns the share of letters a to m (and digits 0 to 4) among all that the episode's agents wrote."""

    kind: Literal["returns"] = "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome and rewards are the same number."""
        share = letter_share("".join(turn.completion_text for turn in trace.turns))
        rewards = tuple(turn_reward(trace, i, {"letters": share}) for i in range(len(trace.turns)))
        return Credit(outcome=share, rewards=rewards)


def letter_share(text: str) -> float:
    """Share of characters in a..m and 0..4; 0 for no text."""
    return sum(c in "abcdefghijklm01234" for c in text) / max(len(text), 1)
