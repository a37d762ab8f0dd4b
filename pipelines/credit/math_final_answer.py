"""math_final_answer: every turn earns the team's accuracy plus its own format (UnityMAS-O, seed-systems 1.1.2 C)."""

from __future__ import annotations

from typing import Literal

from pipelines.credit.rule import Credit, turn_reward
from serve_apps.tools.math_answer import is_correct
from stores.types import Trace


class MathFinalAnswer:
    """R = accuracy of the final answer (1 or 0) + `format_weight` * (0 if the turn's format is ok, else -1)."""

    kind: Literal["returns"] = "returns"

    def __init__(self, format_weight: float = 1.0) -> None:
        self.format_weight = format_weight

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome: accuracy of `trace.answer`; no answer is a wrong one."""
        accuracy = float(is_correct(trace.answer, trace.task.answers))
        rewards = [
            turn_reward(trace, i, {"accuracy": accuracy, "format": 0.0 if turn.is_format_ok else -self.format_weight})
            for i, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=accuracy, rewards=tuple(rewards))
