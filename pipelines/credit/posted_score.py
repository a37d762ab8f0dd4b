"""posted_score: trace -> for each turn, the score that a program or its grader posted for the episode."""

from __future__ import annotations

from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from stores.settings import NotNegative
from stores.types import EpisodeStatus, Trace


class PostedScore:
    """Rewards each turn with posted score + `format_weight` * (0 if its format is valid, else -1)."""

    kind: Literal["returns"] = "returns"

    def __init__(self, format_weight: NotNegative = 0.0) -> None:
        """Args: format_weight: penalty of a turn whose tool call cannot be parsed."""
        self.format_weight = format_weight

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the score, or 0 if the program was truncated before it posted one.

        Raises ValueError if a complete episode has no score.
        """
        score = trace.outcome_metadata.get("score")
        if score is None and trace.status is EpisodeStatus.TRUNCATED:
            score = 0.0
        if score is None:
            raise ValueError(
                f"episode {trace.episode_id} ended without a score: have the program post it to "
                "$TROUPE_EPISODE_URL/outcome, or choose a credit rule that judges the answer"
            )
        rewards = [
            turn_reward(trace, i, {"score": float(score), "format": format_penalty(turn, self.format_weight)})
            for i, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=float(score), rewards=tuple(rewards))
