"""outcome: trace -> the outcome, in full or split among the turns, and a format penalty, for each turn.

It covers query decomposition (EM or F1, full or split: UnityMAS-O, arXiv 2605.26646), Dr. MAS (1 or 0 and a penalty for an
invalid action, subtracted before the advantage: arXiv 2602.08847) and the single agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pipelines.credit.rule import Credit, format_penalty, turn_reward
from serve_apps.tools.math_answer import is_correct, is_prose
from serve_apps.tools.math_strings import is_same_string
from serve_apps.tools.text_match import exact_match, f1
from stores.settings import AgentName, NotNegative
from stores.types import Trace

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "math": lambda answer, references: float(is_correct(answer, references)),
    "math_strings": lambda answer, references: float(is_same_string(answer, references)),
}


def outcome_metric(name: str) -> Callable[[str, Sequence[str]], float]:
    """Returns the metric that the settings name. Raises ValueError for an unknown one."""
    if name not in METRICS:
        raise ValueError(f"credit.settings.metric: {name!r} is not known: one of {', '.join(METRICS)}")
    return METRICS[name]


def check_share(share: str) -> None:
    """Raises ValueError if `share` is neither `full` nor `split`."""
    if share not in ("full", "split"):
        raise ValueError(f"credit.settings.share: {share!r} is not known: full or split")


class OutcomeShare:
    """Rewards a turn with outcome (or outcome / number of sharing turns) + `format_weight` * (0 if its format is valid, else -1)."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        metric: str = "em",
        share: Literal["full", "split"] = "full",
        format_weight: NotNegative = 1.0,
        sharing: Sequence[AgentName] = (),
    ) -> None:
        """Args:
        metric: em, f1, math, or math_strings (the reference systems' rules).
        share: `full`: each turn gets the whole outcome; `split`: it is divided by the number of sharing turns.
        format_weight: penalty of a turn with an invalid format; Dr. MAS uses 0.1 for math, 0.01 for search.
        sharing: agents that share the outcome; empty: all. The others get their format penalty only.
        """
        self.metric = outcome_metric(metric)
        check_share(share)
        self.share, self.format_weight, self.sharing = share, format_weight, tuple(sharing)

    def outcome_of(self, trace: Trace) -> float:
        """Returns the metric of the episode's answer. A missing answer is wrong."""
        return self.metric(trace.answer, trace.task.answers)

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit: what each turn gets of the episode's outcome."""
        outcome = self.outcome_of(trace)
        is_sharing = [self.shares(turn.agent) for turn in trace.turns]
        each = outcome / max(1, sum(is_sharing)) if self.share == "split" else outcome
        rewards = [
            turn_reward(
                trace,
                i,
                {"outcome": each if is_sharing[i] else 0.0, "format": format_penalty(turn, self.format_weight)},
            )
            for i, turn in enumerate(trace.turns)
        ]
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def reads(self, reference: str) -> bool:
        """Says whether another text than the reference itself could be right."""
        return self.metric is not METRICS["math"] or not is_prose(reference)

    def shares(self, agent: str) -> bool:
        """Says whether turns of `agent` get a share of the outcome."""
        return not self.sharing or agent in self.sharing
