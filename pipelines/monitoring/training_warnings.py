"""training_warnings: the figures of a run's iterations -> warnings in words: no signal, collapse, hacking, divergence, and what to try.

Each figure is compared with the run's own earlier iterations first (median and median absolute deviation), and is a
warning only beyond an absolute bound as well, so that neither a calm run's noise nor a wild run's habits raise one. Levels
from which no run learns are warnings at once, from the first iteration on. Of a long run a bounded number of iterations stands
for all earlier ones (`compared_iterations`).

    no signal    no turn of an agent is well-formed, every one is cut, no turn of the team has an advantage, or steps are too
                 small for what the engines compute in
    collapse     entropy near 0 or a small share of its start, while there is still something to learn; no signal in most groups
    hacking      the reward rises while the outcome falls; completions grow; credit does not follow the outcome
    divergence   KL, gradient norm or clip share far above what they were; a critic that explains less than nothing
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any, Literal

from pipelines.config.figures import FIGURES, INDISTINGUISHABLE, INSPECT

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

NOTHING, ALL = 0.005, 0.995
"""Shares up to which something never happens, and from which on it always does."""
RECENT = 64
"""Latest iterations that are all compared with."""
SPREAD = 64
"""At most so many iterations stand for what was before these, evenly spaced."""

Kind = Literal["no signal", "collapse", "hacking", "divergence"]
KINDS: tuple[Kind, ...] = ("no signal", "collapse", "hacking", "divergence")
"""The most pressing first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWarning:
    """One figure that left its usual range."""

    kind: Kind
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
        return f"{self.kind.replace(' ', '_')}/{self.where.replace(' ', '/')}/{self.figure}"


def compared_iterations(iteration: int) -> list[int]:
    """Returns the earlier iterations that an iteration is compared with, in order: at most `MIN_HISTORY + RECENT + SPREAD`.

    They are all of them up to `RECENT`. Of a longer run they are the first `MIN_HISTORY`, each `step`-th, where `step` is the
    least power of two that leaves at most `SPREAD`, and the latest `RECENT`.
    """
    step = 1
    while (iteration - 1) // step > SPREAD:
        step *= 2
    recent = range(max(1, iteration - RECENT), iteration)
    return sorted({*range(1, min(MIN_HISTORY + 1, iteration)), *range(step, iteration, step), *recent})


def latest_warnings(rows: Sequence[Row]) -> list[TrainingWarning]:
    """Returns the warnings of the last iteration of `rows` (see `report.ReportData.iterations`), in the order of their
    kinds."""
    outcome = _series(rows, lambda row: row.get("metrics", {}).get("outcome"))
    warnings: list[TrainingWarning] = []
    for part, word in (("groups", "group"), ("agents", "agent")):
        for name in dict.fromkeys(key for row in rows for key in row.get(part) or {}):
            figures = _figures(rows, part, name)
            warnings += [
                w for check in CHECKS if (w := _warning(check, figures, f"{word} {name}", outcome)) is not None
            ]
    reward = _series(rows, lambda row: row.get("metrics", {}).get("reward"))
    if (against := _outcome_against_reward(reward, outcome)) is not None:
        warnings.append(against)
    last = rows[-1]["iteration"] if rows else 0
    warnings += _hopeless_levels(rows[-1], outcome) if rows else []
    warnings += _unseen_steps(rows)
    return sorted((w for w in warnings if w.iteration == last), key=lambda w: KINDS.index(w.kind))


def all_warnings(rows: Sequence[Row]) -> list[TrainingWarning]:
    """Returns the warnings of every iteration, each as it was seen then; a warning that stays is listed once."""
    warnings: list[TrainingWarning] = []
    before: set[str] = set()
    for end in range(1, len(rows) + 1):
        latest = latest_warnings(rows[:end])
        warnings += [w for w in latest if w.key not in before]
        before = {w.key for w in latest}
    return warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """When a figure of one model group or agent is a warning; what it means and what to try is in `figures.FIGURES`."""

    figure: str
    kind: Kind
    seen: Callable[[Series, Series], str]
    """(the figure, the outcome) -> what was seen, in words with numbers; empty where there is nothing to warn of."""
    is_of_agents: bool = False
    """Whether it is checked for agents only."""


def _warning(check: Check, figures: Mapping[str, Series], where: str, outcome: Series) -> TrainingWarning | None:
    series = figures.get(check.figure, ())
    if not series or (check.is_of_agents and not where.startswith("agent")):
        return None
    what = check.seen(series, outcome)
    if not what:
        return None
    return TrainingWarning(
        kind=check.kind,
        where=where,
        figure=check.figure,
        iteration=series[-1][0],
        what=what,
        try_=FIGURES[check.figure].try_,
    )


def _hopeless_levels(row: Row, outcome: Series) -> list[TrainingWarning]:
    """Returns a warning for each level of one iteration from which nothing can be learnt, whatever came before it."""
    levels = []
    for agent, figures in (row.get("agents") or {}).items():
        if figures.get("format", 1.0) <= NOTHING:
            what = "no turn is well-formed"
            fix = f"{INSPECT}; the agent's prompt and contract, a warm start; the end tokens of the model folder"
            levels.append((f"agent {agent}", "format_share", what, fix))
        if figures.get("cut_share", 0.0) >= ALL:
            what = "every turn is cut at max_tokens: what earns a reward after that is never reached"
            fix = f"a higher max_tokens; {INSPECT}: whether the model stops at all, and the end tokens of the model folder"
            levels.append((f"agent {agent}", "cut_share", what, fix))
    funnel = (row.get("funnel") or {}).values()
    calls, learning = (sum(counts.get(step, 0) for counts in funnel) for step in ("calls", "non_zero_advantage"))
    if calls and not learning and not _is_learnt(outcome):
        what = f"none of {calls} turns has an advantage: this iteration taught nothing"
        fix = "the funnel in the report; easier tasks, more episodes_per_task, collect.dynamic_sampling"
        levels.append(("team", "non_zero_advantage", what, fix))
    return [
        TrainingWarning(kind="no signal", where=where, figure=name, iteration=row["iteration"], what=what, try_=fix)
        for where, name, what, fix in levels
    ]


def _has_trained(figures: Mapping[str, Any]) -> bool:
    """Says whether a model group trained on any row: a failed one keeps its version."""
    return not figures.get("train/is_failed") and figures.get("train/trained_rows", 1.0) > 0


def _unseen_steps(rows: Sequence[Row]) -> list[TrainingWarning]:
    """Returns a warning for each model group of whose latest versions, all trained, none differs from its parent by more
    than the engine rounds: the engines may sample from what they sampled from before."""
    latest, warnings = rows[-LATEST:], []
    for group, proof in (latest[-1].get("proofs") or {}).items() if len(latest) == LATEST else ():
        of_group = [((row.get("proofs") or {}).get(group) or {}, (row["groups"].get(group) or {})) for row in latest]
        if all(p.get("is_indistinguishable") and _has_trained(f) for p, f in of_group):
            what = (
                f"none of the last {LATEST} versions can be told apart from its parent: they differ by {proof['difference_old']:.2g} "
                f"nats where the engine rounds by {proof['noise']:.2g}"
            )
            warnings.append(
                TrainingWarning(
                    kind="no signal",
                    where=f"group {group}",
                    figure=INDISTINGUISHABLE,
                    iteration=latest[-1]["iteration"],
                    what=what,
                    try_=FIGURES[INDISTINGUISHABLE].try_,
                )
            )
    return warnings


def _vanished_entropy(entropy: Series, outcome: Series) -> str:
    """Below 0.005 nats, or a twentieth of the start, while most tasks are not solved and the outcome has stopped rising."""
    value, start = entropy[-1][1], mean(v for _, v in entropy[:2])
    if len(entropy) <= MIN_HISTORY or _is_learnt(outcome) or _is_rising(outcome) or value >= max(0.005, 0.05 * start):
        return ""
    return f"entropy is {value:.3g} nats, it began at {start:.3g}, and the outcome does not rise"


def _missing_signal(shares: Series, outcome: Series) -> str:
    """No signal in nine tenths of the groups, over several iterations, though tasks are left to solve."""
    latest = shares[-LATEST:]
    if len(latest) < LATEST or min(v for _, v in latest) < 0.9 or _is_learnt(outcome):
        return ""
    return f"{latest[-1][1]:.0%} of the groups have no signal: all their episodes earned the same"


def _missing_anchors(shares: Series, outcome: Series) -> str:
    """GiGPO in which, over several iterations, nearly no turn saw what another turn of its task saw."""
    latest = shares[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) >= 0.05:
        return ""
    return f"only {latest[-1][1]:.0%} of the turns share their prompt with another: gigpo is plain grpo here"


def _grown_completions(lengths: Series, outcome: Series) -> str:
    """Completions twice as long as at first, far above what they were, and no better outcome."""
    value, start = lengths[-1][1], median(v for _, v in lengths[:MIN_HISTORY])
    if len(lengths) <= MIN_HISTORY or _is_rising(outcome) or value < 2 * max(start, 1.0) or not outcome:
        return ""
    return f"completions have grown to {value:.0f} tokens from {start:.0f}, and the outcome does not rise"


def _opposed_credit(correlations: Series, outcome: Series) -> str:
    """An agent's credit goes against the outcome, over several iterations: what it is paid for does not help the team."""
    latest = correlations[-LATEST:]
    if len(latest) < LATEST or max(v for _, v in latest) > -0.1:
        return ""
    value = mean(v for _, v in latest)
    return f"{_changed('credit_correlation')} (correlation {value:+.2f} over {LATEST} iterations)"


def _useless_critic(shares: Series, outcome: Series) -> str:
    """A critic that is worse than the mean, when it has had time to learn."""
    latest = shares[-MIN_HISTORY:]
    if len(shares) <= MIN_HISTORY or max(v for _, v in latest) >= -0.1:
        return ""
    value = latest[-1][1]
    return f"{_changed('explained_variance')} (explained variance {value:.2f}, {MIN_HISTORY} iterations below -0.1)"


def _jump_above(bound: float, figure: str) -> Callable[[Series, Series], str]:
    """Returns a check for a value above `bound`, above three times the median of the earlier ones, and far from them."""

    def seen(series: Series, outcome: Series) -> str:
        value, earlier = series[-1][1], [v for _, v in series[:-1]]
        if (
            len(series) <= MIN_HISTORY
            or value <= bound
            or value <= 3 * median(earlier)
            or deviation(value, earlier) < FAR
        ):
            return ""
        return f"{_changed(figure)}: {value:.3g}, {median(earlier):.3g} is usual in this run"

    return seen


def _changed(figure: str) -> str:
    return FIGURES[figure].changed


CHECKS = (
    Check(figure="entropy", kind="collapse", seen=_vanished_entropy),
    Check(figure="groups_without_signal", kind="collapse", seen=_missing_signal),
    Check(figure="anchor_share", kind="collapse", seen=_missing_anchors),
    Check(figure="completion_tokens", kind="hacking", seen=_grown_completions, is_of_agents=True),
    Check(figure="credit_correlation", kind="hacking", seen=_opposed_credit),
    Check(figure="explained_variance", kind="divergence", seen=_useless_critic),
    Check(figure="kl_k3", kind="divergence", seen=_jump_above(0.05, "kl_k3")),
    Check(figure="kl_ref_k3", kind="divergence", seen=_jump_above(0.5, "kl_ref_k3")),
    Check(figure="grad_norm", kind="divergence", seen=_jump_above(2.0, "grad_norm")),
    Check(figure="clip_share", kind="divergence", seen=_jump_above(0.2, "clip_share")),
)
"""What is checked of every model group and every agent."""


def _outcome_against_reward(reward: Series, outcome: Series) -> TrainingWarning | None:
    """Over the second half of the run the reward has risen beyond its noise and the outcome has fallen beyond its own."""
    if min(len(reward), len(outcome)) < 2 * LATEST + 2:
        return None
    better, worse = _change(reward), _change(outcome)
    if better < 0.05 or worse > -0.05 or better < 2 * _noise(reward) or -worse < 2 * _noise(outcome):
        return None
    return TrainingWarning(
        kind="hacking",
        where="team",
        figure="outcome",
        iteration=outcome[-1][0],
        what=f"the mean reward has risen by {better:.2f} while the outcome has fallen by {-worse:.2f}",
        try_=FIGURES["reward_over_outcome"].try_,
    )


def deviation(value: float, earlier: Sequence[float]) -> float:
    """Robust z: distance from the median in 1.4826 median absolute deviations, never less than a tenth of the median."""
    middle = median(earlier)
    spread = 1.4826 * median(abs(v - middle) for v in earlier)
    return (value - middle) / max(spread, 0.1 * abs(middle), 1e-12)


def _change(series: Series) -> float:
    """The last iterations' mean less that of as many at the run's middle."""
    first, last = series[0][0], series[-1][0]
    middle = first + (last - first - LATEST + 1) // 2
    half = bisect_left(series, middle, key=_iteration)
    return mean(v for _, v in series[-LATEST:]) - mean(v for _, v in series[half : half + LATEST])


def _iteration(point: tuple[int, float]) -> int:
    return point[0]


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
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in ((row.get(part) or {}).get(name) or {}).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                series.setdefault(key.removeprefix("train/"), []).append((row["iteration"], float(value)))
    return dict(series)


def _series(rows: Sequence[Row], value: Callable[[Row], Any]) -> Series:
    pairs = [(row["iteration"], value(row)) for row in rows]
    return [(k, float(v)) for k, v in pairs if isinstance(v, (int, float)) and math.isfinite(v)]
