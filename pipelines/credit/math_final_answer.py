"""math_final_answer: trace -> the team's accuracy and its own format, for each turn (UnityMAS-O, arXiv 2605.26646)."""

from __future__ import annotations

from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.math_answer import is_correct, is_prose
from stores.settings import NotNegative
from stores.types import Trace


class MathFinalAnswer:
    """Rewards each turn with accuracy (1 or 0) + `format_weight` * (0 if the turn's format is valid, else -1)."""

    kind: Literal["returns"] = "returns"

    def __init__(self, format_weight: NotNegative = 1.0) -> None:
        self.format_weight = format_weight

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the accuracy of `trace.answer`. A missing answer is wrong."""
        accuracy = float(is_correct(trace.answer, trace.task.answers))
        rewards = [
            turn_reward(trace, i, {"accuracy": accuracy, "format": format_penalty(turn, self.format_weight)})
            for i, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=accuracy, rewards=tuple(rewards))

    def reads(self, reference: str) -> bool:
        """Says whether another text than the reference itself could be right."""
        return not is_prose(reference)
