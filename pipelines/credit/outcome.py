"""outcome: every turn earns what the team's answer is worth, in full or its share, less what its own format costs.

Covers query decomposition (EM or F1, full or split: seed-systems 1.1.2 D), Dr. MAS (1/0 and the penalty for an invalid
action, subtracted before the advantage: 1.2) and the single agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.math_answer import is_correct
from serve_apps.tools.text_match import exact_match, f1
from stores.types import Trace

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "math": lambda answer, references: float(is_correct(answer, references)),
    "math_strings": lambda answer, references: float(is_correct(answer, references, rules="strings")),
}


def outcome_metric(name: str) -> Callable[[str, Sequence[str]], float]:
    """The metric that settings name; ValueError for any other."""
    if name not in METRICS:
        raise ValueError(f"credit.settings.metric: {name!r} is not known: one of {', '.join(METRICS)}")
    return METRICS[name]


def check_share(share: str) -> None:
    """Raises ValueError for what is neither `full` nor `split`."""
    if share not in ("full", "split"):
        raise ValueError(f"credit.settings.share: {share!r} is not known: full or split")


class OutcomeShare:
    """R = outcome (or outcome / number of sharing turns) + `format_weight` * (0 if the turn's format is ok, else -1)."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        metric: str = "em",
        share: Literal["full", "split"] = "full",
        format_weight: float = 1.0,
        sharing: Sequence[str] = (),
    ) -> None:
        """Args:
        metric: em, f1, math, or math_strings (the reference systems' rules).
        share: `full`: each turn earns the whole outcome; `split`: they earn it together.
        format_weight: what a broken format costs; Dr. MAS: 0.1 for math, 0.01 for search.
        sharing: agents that earn the outcome; empty: all. The others earn their format alone.
        """
        self.metric = outcome_metric(metric)
        check_share(share)
        self.share, self.format_weight, self.sharing = share, format_weight, tuple(sharing)

    def assign_credit(self, trace: Trace) -> Credit:
        """Outcome: the metric of `trace.answer`; no answer is a wrong one."""
        outcome = self.metric(trace.answer, trace.task.answers)
        paid = [not self.sharing or turn.agent in self.sharing for turn in trace.turns]
        each = outcome / max(1, sum(paid)) if self.share == "split" else outcome
        rewards = [
            turn_reward(
                trace, i, {"outcome": each if paid[i] else 0.0, "format": format_penalty(turn, self.format_weight)}
            )
            for i, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=outcome, rewards=tuple(rewards))
