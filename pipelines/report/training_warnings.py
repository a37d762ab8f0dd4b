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
from typing import Any

from pipelines.figures.checks import LATEST, MIN_HISTORY, Kind, Series, is_learnt
from pipelines.figures.figure import INSPECT, Figure
from pipelines.figures.of_training import INDISTINGUISHABLE
from pipelines.figures.registry import FIGURES

Row = Mapping[str, Any]
NOTHING, ALL = 0.005, 0.995
"""Shares up to which something never happens, and from which on it always does."""
RECENT = 64
"""Latest iterations that are all compared with."""
SPREAD = 64
"""At most so many iterations stand for what was before these, evenly spaced."""
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
            measured = _figures(rows, part, name)
            judged = (_warning(figure, measured, f"{word} {name}", outcome) for figure in FIGURES.values())
            warnings += [warning for warning in judged if warning is not None]
    reward = _series(rows, lambda row: row.get("metrics", {}).get("reward"))
    if (against := _outcome_against_reward(reward, outcome)) is not None:
        warnings.append(against)
    last = rows[-1]["iteration"] if rows else 0
    warnings += _hopeless_levels(rows[-1], outcome) if rows else []
    warnings += _unseen_steps(rows)
    return sorted((w for w in warnings if w.iteration == last), key=lambda w: KINDS.index(w.kind))


def _warning(figure: Figure, measured: Mapping[str, Series], where: str, outcome: Series) -> TrainingWarning | None:
    """Checks one figure of one model group or agent."""
    series, check = measured.get(figure.name, ()), figure.check
    if not series or check is None or (check.is_of_agents and not where.startswith("agent")):
        return None
    what = check.seen(series, outcome, figure.changed)
    if not what:
        return None
    return TrainingWarning(
        kind=check.kind,
        where=where,
        figure=figure.name,
        iteration=series[-1][0],
        what=what,
        try_=figure.try_,
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
    if calls and not learning and not is_learnt(outcome):
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
