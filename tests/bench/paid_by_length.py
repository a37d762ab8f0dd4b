"""paid_by_length: a credit rule with a hole. Right answers pay, and so do words: a team that learns by it pads what it says."""

from __future__ import annotations

from typing import Literal

from pipelines.credit.rule import Credit, turn_reward
from serve_apps.tools.math_answer import is_correct
from stores.types import Trace


class PaidByLength:
    """R = accuracy of the final answer + `weight` * the turn's completion tokens / `max_tokens`; 0 for a malformed turn."""

    kind: Literal["returns"] = "returns"

    def __init__(self, weight: float = 1.0, max_tokens: int = 64) -> None:
        self.weight, self.max_tokens = weight, max_tokens

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome: accuracy of `trace.answer`."""
        accuracy = float(is_correct(trace.answer, trace.task.answers))
        rewards = []
        for i, turn in enumerate(trace.turns):
            length = self.weight * len(turn.completion_token_ids) / self.max_tokens
            parts = {"accuracy": accuracy, "length": length} if turn.is_format_ok else {"malformed": 0.0}
            rewards.append(turn_reward(trace, i, parts))
        return Credit(outcome=accuracy, rewards=tuple(rewards))
