"""checks: a figure of an iteration's training and those of earlier iterations -> what is wrong, in words with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

Series = Sequence[tuple[int, float]]
"""(iteration, value), oldest first."""
Seen = Callable[[Series, Series, str], str]
"""(the figure, the outcome, `Figure.changed`) -> what was seen, in words with numbers; empty where there is nothing to warn of."""
Kind = Literal["no signal", "collapse", "hacking", "divergence"]
MIN_HISTORY = 4
"""Earlier iterations that a figure needs before it is compared with them."""
FAR = 6.0
"""Robust standard deviations above the median that are far."""
LATEST = 3
"""Iterations whose mean stands for the present where one alone says little."""
LEARNT = 0.9
"""Outcome from which on an entropy near 0, and groups without signal, mean that the tasks are solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """When a figure of one model group or agent is a warning."""

    kind: Kind
    seen: Seen
    is_of_agents: bool = False
    """Whether it is checked for agents only."""


def vanished_entropy(entropy: Series, outcome: Series, changed: str) -> str:
    """Below 0.005 nats, or a twentieth of the start, while most tasks are not solved and the outcome has stopped rising."""
    value, start = entropy[-1][1], mean(v for _, v in entropy[:2])
    if len(entropy) <= MIN_HISTORY or is_learnt(outcome) or is_rising(outcome) or value >= max(0.005, 0.05 * start):
        return ""
    return f"entropy is {value:.3g} nats, it began at {start:.3g}, and the outcome does not rise"


def missing_signal(shares: Series, outcome: Series, changed: str) -> str:
    """No signal in nine tenths of the groups, over several iterations, though tasks are left to solve."""
    latest = shares[-LATEST:]
    if len(latest) < LATEST or min(v for _, v in latest) < 0.9 or is_learnt(outcome):
        return ""
    return f"{latest[-1][1]:.0%} of the groups have no signal: all their episodes earned the same"


def missing_anchors(shares: Series, outcome: Series, changed: str) -> str:
    """GiGPO in which, over several iterations, nearly no turn saw what another turn of its task saw."""
    latest = shares[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) >= 0.05:
        return ""
    return f"only {latest[-1][1]:.0%} of the turns share their prompt with another: gigpo is plain grpo here"


def grown_completions(lengths: Series, outcome: Series, changed: str) -> str:
    """Completions twice as long as at first, far above what they were, and no better outcome."""
    value, start = lengths[-1][1], median(v for _, v in lengths[:MIN_HISTORY])
    if len(lengths) <= MIN_HISTORY or is_rising(outcome) or value < 2 * max(start, 1.0) or not outcome:
        return ""
    return f"completions have grown to {value:.0f} tokens from {start:.0f}, and the outcome does not rise"


def opposed_credit(correlations: Series, outcome: Series, changed: str) -> str:
    """An agent's credit goes against the outcome, over several iterations: what it is paid for does not help the team."""
    latest = correlations[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) > -0.1:
        return ""
    value = mean(v for _, v in latest)
    return f"{changed} (correlation {value:+.2f} over {LATEST} iterations)"


def useless_critic(shares: Series, outcome: Series, changed: str) -> str:
    """A critic that is worse than the mean, when it has had time to learn."""
    latest = shares[-MIN_HISTORY:]
    if len(shares) <= MIN_HISTORY or max(v for _, v in latest) >= -0.1:
        return ""
    value = latest[-1][1]
    return f"{changed} (explained variance {value:.2f}, {MIN_HISTORY} iterations below -0.1)"


def jump_above(bound: float) -> Seen:
    """Returns a check for a value above `bound`, above three times the median of the earlier ones, and far from them."""

    def seen(series: Series, outcome: Series, changed: str) -> str:
        value, earlier = series[-1][1], [v for _, v in series[:-1]]
        if (
            len(series) <= MIN_HISTORY
            or value <= bound
            or value <= 3 * median(earlier)
            or deviation(value, earlier) < FAR
        ):
            return ""
        return f"{changed}: {value:.3g}, {median(earlier):.3g} is usual in this run"

    return seen


def deviation(value: float, earlier: Sequence[float]) -> float:
    """Robust z: distance from the median in 1.4826 median absolute deviations, never less than a tenth of the median."""
    middle = median(earlier)
    spread = 1.4826 * median(abs(v - middle) for v in earlier)
    return (value - middle) / max(spread, 0.1 * abs(middle), 1e-12)


def is_rising(outcome: Series) -> bool:
    """Whether the present is better than the best of what was before it, noise aside; true while nobody can know."""
    if len(outcome) < 2 * LATEST:
        return True
    *earlier, now = (mean(v for _, v in outcome[i : i + LATEST]) for i in range(len(outcome) - LATEST + 1))
    return now > max(earlier[: 1 - LATEST]) + 0.01


def is_learnt(outcome: Series) -> bool:
    """Whether nearly all tasks are solved."""
    return bool(outcome) and mean(v for _, v in outcome[-LATEST:]) >= LEARNT
