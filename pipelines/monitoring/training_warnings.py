"""symptoms: the figures of a run's iterations -> warnings in words: collapse, hacking, divergence, and what to try.

Each figure is compared with the run's own earlier iterations first (median and median absolute deviation), and is a
warning only beyond an absolute bound as well, so that neither a calm run's noise nor a wild run's habits raise one.

    collapse     entropy near 0 or a small share of its start, while there is still something to learn; no signal in most groups
    hacking      the reward rises while the outcome falls; completions grow; credit does not follow the outcome
    divergence   KL, gradient norm or clip share far above what they were; a critic that explains less than nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any, Literal

Row = Mapping[str, Any]
Series = Sequence[tuple[int, float]]
"""(iteration, value), oldest first."""

MIN_HISTORY = 4
"""Earlier iterations that a figure needs before it is compared with them."""
FAR = 6.0
"""Robust standard deviations above the median that are far."""
LATEST = 3
"""Iterations whose mean stands for the present where one alone says little."""
LEARNT = 0.9
"""Outcome from which on an entropy near 0, and groups without signal, mean that the tasks are solved."""

JUMPS: Mapping[str, tuple[float, str, str]] = {
    "kl_k3": (
        0.05,
        "the update moved the policy far from its parent (KL)",
        "lower optimizer.lr, or add loss.kl_in_loss_coef",
    ),
    "kl_ref_k3": (0.5, "the policy left its reference (KL)", "raise loss.kl_in_loss_coef or loss.kl_in_reward_coef"),
    "grad_norm": (2.0, "the gradient's norm jumped", "lower optimizer.max_grad_norm or optimizer.lr"),
    "clip_share": (
        0.2,
        "far more tokens than before were clipped",
        "lower optimizer.lr, num_epochs or num_minibatches",
    ),
}
"""Figure -> absolute bound below which a jump is no warning, what it means, what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One figure that left its usual range."""

    kind: Literal["collapse", "hacking", "divergence"]
    where: str
    """`group <name>`, `agent <name>` or `team`."""
    figure: str
    iteration: int
    what: str
    """What was seen, with numbers."""
    try_: str
    """What to try."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}, iteration {self.iteration}: {self.what}; try: {self.try_}"

    @property
    def key(self) -> str:
        """What MLflow calls it: `<kind>/<where>/<figure>`."""
        return f"{self.kind}/{self.where.replace(' ', '/')}/{self.figure}"


def find_symptoms(rows: Sequence[Row]) -> list[Symptom]:
    """The warnings of the last iteration of `rows` (see `report.ReportData.iterations`), in the order of their kinds."""
    outcome = _series(rows, lambda row: row.get("metrics", {}).get("outcome"))
    found: list[Symptom] = []
    for part, word in (("groups", "group"), ("agents", "agent")):
        for name in dict.fromkeys(key for row in rows for key in row.get(part) or {}):
            figures = _figures(rows, part, name)
            where = f"{word} {name}"
            found += [s for check in CHECKS for s in check(figures, where, outcome)]
            found += [s for figure in JUMPS for s in _jump(figures.get(figure, ()), where, figure)]
    found += _outcome_against_reward(_series(rows, lambda row: row.get("metrics", {}).get("reward")), outcome)
    last = rows[-1]["iteration"] if rows else 0
    order = ("collapse", "hacking", "divergence")
    return sorted((s for s in found if s.iteration == last), key=lambda s: order.index(s.kind))


def all_symptoms(rows: Sequence[Row]) -> list[Symptom]:
    """The warnings of every iteration, each as it was seen then; a warning that stays is told once."""
    found: list[Symptom] = []
    before: set[str] = set()
    for end in range(1, len(rows) + 1):
        seen = find_symptoms(rows[:end])
        found += [s for s in seen if s.key not in before]
        before = {s.key for s in seen}
    return found


def _entropy(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """Below 0.005 nats, or a twentieth of the start, while most tasks are not solved and the outcome has stopped rising."""
    entropy = figures.get("entropy", ())
    if len(entropy) <= MIN_HISTORY or _is_learnt(outcome) or _is_rising(outcome):
        return []
    iteration, value = entropy[-1]
    start = mean(v for _, v in entropy[:2])
    if value >= max(0.005, 0.05 * start):
        return []
    return [
        Symptom(
            kind="collapse",
            where=where,
            figure="entropy",
            iteration=iteration,
            what=f"entropy is {value:.3g} nats, it began at {start:.3g}, and the outcome does not rise",
            try_="loss.entropy_coef above 0, a higher loss.clip_high, a lower optimizer.lr",
        )
    ]


def _signal(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """No signal in nine tenths of the groups, over several iterations, though tasks are left to solve."""
    latest = figures.get("groups_without_signal", ())[-LATEST:]
    if len(latest) < LATEST or min(v for _, v in latest) < 0.9 or _is_learnt(outcome):
        return []
    iteration, value = latest[-1]
    return [
        Symptom(
            kind="collapse",
            where=where,
            figure="groups_without_signal",
            iteration=iteration,
            what=f"{value:.0%} of the groups have no signal: all their episodes earned the same",
            try_="easier or harder tasks, more collect.episodes_per_task, collect.dynamic_sampling, a credit rule per turn",
        )
    ]


def _anchors(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """GiGPO in which, over several iterations, nearly no turn saw what another turn of its task saw."""
    latest = figures.get("anchor_share", ())[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) >= 0.05:
        return []
    iteration, value = latest[-1]
    return [
        Symptom(
            kind="collapse",
            where=where,
            figure="anchor_share",
            iteration=iteration,
            what=f"only {value:.0%} of the turns share their prompt with another: gigpo is plain grpo here",
            try_="a lower advantage.similarity (0.9), more collect.episodes_per_task, algorithm dr_mas",
        )
    ]


def _length(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """Completions twice as long as at first, far above what they were, and no better outcome."""
    lengths = figures.get("completion_tokens", ())
    if not where.startswith("agent") or len(lengths) <= MIN_HISTORY or _is_rising(outcome):
        return []
    iteration, value = lengths[-1]
    start = median(v for _, v in lengths[:MIN_HISTORY])
    if value < 2 * max(start, 1.0) or not outcome:
        return []
    return [
        Symptom(
            kind="hacking",
            where=where,
            figure="completion_tokens",
            iteration=iteration,
            what=f"completions have grown to {value:.0f} tokens from {start:.0f}, and the outcome does not rise",
            try_="train.overlong, loss.aggregation token_mean, a lower max_tokens",
        )
    ]


def _credit(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """An agent's credit goes against the outcome, over several iterations: what it is paid for does not help the team."""
    latest = figures.get("credit_correlation", ())[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) > -0.1:
        return []
    iteration, _ = latest[-1]
    value = mean(v for _, v in latest)
    return [
        Symptom(
            kind="hacking",
            where=where,
            figure="credit_correlation",
            iteration=iteration,
            what=f"its credit goes against the outcome (correlation {value:+.2f} over {LATEST} iterations)",
            try_="a credit rule that pays what helps the team, a smaller weight of its other parts (format ...)",
        )
    ]


def _explained(figures: Mapping[str, Series], where: str, outcome: Series) -> list[Symptom]:
    """A critic that is worse than the mean, when it has had time to learn."""
    values = figures.get("explained_variance", ())
    latest = values[-MIN_HISTORY:]
    if len(values) <= MIN_HISTORY or max(v for _, v in latest) >= -0.1:
        return []
    iteration, value = latest[-1]
    return [
        Symptom(
            kind="divergence",
            where=where,
            figure="explained_variance",
            iteration=iteration,
            what=f"the critic explains less than nothing (explained variance {value:.2f}, {MIN_HISTORY} iterations below -0.1)",
            try_="critic.warmup_iterations, another critic.optimizer.lr, an algorithm without a critic",
        )
    ]


def _jump(series: Series, where: str, figure: str) -> list[Symptom]:
    bound, meaning, advice = JUMPS[figure]
    if len(series) <= MIN_HISTORY:
        return []
    iteration, value = series[-1]
    earlier = [v for _, v in series[:-1]]
    if value <= bound or value <= 3 * median(earlier) or deviation(value, earlier) < FAR:
        return []
    return [
        Symptom(
            kind="divergence",
            where=where,
            figure=figure,
            iteration=iteration,
            what=f"{meaning}: {value:.3g}, {median(earlier):.3g} is usual in this run",
            try_=advice,
        )
    ]


CHECKS = (_entropy, _signal, _anchors, _length, _credit, _explained)
"""Of the figures of one model group or agent."""


def _outcome_against_reward(reward: Series, outcome: Series) -> list[Symptom]:
    """Over the second half of the run the reward has risen beyond its noise and the outcome has fallen beyond its own."""
    if min(len(reward), len(outcome)) < 2 * LATEST + 2:
        return []
    better, worse = _change(reward), _change(outcome)
    if better < 0.05 or worse > -0.05 or better < 2 * _noise(reward) or -worse < 2 * _noise(outcome):
        return []
    return [
        Symptom(
            kind="hacking",
            where="team",
            figure="outcome",
            iteration=outcome[-1][0],
            what=f"the mean reward has risen by {better:.2f} while the outcome has fallen by {-worse:.2f}",
            try_="look at episodes with a high reward (troupe show); make the credit rule pay the outcome",
        )
    ]


def deviation(value: float, earlier: Sequence[float]) -> float:
    """Robust z: distance from the median in 1.4826 median absolute deviations, never less than a tenth of the median."""
    middle = median(earlier)
    spread = 1.4826 * median(abs(v - middle) for v in earlier)
    return (value - middle) / max(spread, 0.1 * abs(middle), 1e-12)


def _change(series: Series) -> float:
    """The last iterations' mean less that of as many at the run's middle."""
    half = (len(series) - LATEST) // 2
    return mean(v for _, v in series[-LATEST:]) - mean(v for _, v in series[half : half + LATEST])


def _noise(series: Series) -> float:
    """Median size of a step from one iteration to the next."""
    return median(abs(b - a) for (_, a), (_, b) in pairwise(series))


def _is_rising(outcome: Series) -> bool:
    """Whether the present is better than the best of what was before it, noise aside; true while nobody can know."""
    if len(outcome) < 2 * LATEST:
        return True
    return mean(v for _, v in outcome[-LATEST:]) > mean(v for _, v in outcome[-2 * LATEST : -LATEST]) + 0.01


def _is_learnt(outcome: Series) -> bool:
    return bool(outcome) and mean(v for _, v in outcome[-LATEST:]) >= LEARNT


def _figures(rows: Sequence[Row], part: str, name: str) -> dict[str, Series]:
    """Figure, without the prefix `train/`, -> its series."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in ((row.get(part) or {}).get(name) or {}).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(key.removeprefix("train/"), []).append((row["iteration"], float(value)))
    return dict(found)


def _series(rows: Sequence[Row], value: Callable[[Row], Any]) -> Series:
    pairs = [(row["iteration"], value(row)) for row in rows]
    return [(k, float(v)) for k, v in pairs if isinstance(v, (int, float)) and math.isfinite(v)]
