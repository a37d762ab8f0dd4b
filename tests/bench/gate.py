"""gate: how often it promotes a team that is no better, also one that fails instead of losing, and how often one that is better.

Two teams play the same tasks, one episode each, and solve a task with a chance of the task's own; the candidate's is higher or
lower by some points. A candidate that escapes ends a share of the episodes that it would lose as failed, by any cause. The gate
decides once, or looks ten times. Floors and guards are off, so that the interval alone decides. "Left out" is the gate that knows
no causes: every failed episode drops out of the comparison.

Teams one iteration apart often differ on few tasks. Two more tables are of equal teams that differ so, and of teams that are worse by
just the margin of `promote.non_inferiority` and win nowhere, under `evaluate.test: mcnemar`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.confidence_sequence import sequence_interval
from pipelines.evaluation.gate import Evidence, decide_promotion
from pipelines.evaluation.missing import worst_case
from pipelines.evaluation.statistics import Interval, Outcomes, exact_interval, paired_differences, paired_interval
from stores.types import COUNTED, Cause
from tests.bench.figures import Figure

NUM_PAIRS, NUM_LOOKS, NUM_SAMPLES = 1000, 10, 2000
SIZES = (512, 2048)
FEW_DIFFER = ((64, 0.04), (128, 0.04), (256, 0.02), (512, 0.01))
"""Numbers of tasks, and the share of them on which the teams differ."""
ESCAPED = (0.0, 0.05, 0.09, 0.2, 0.3)
CAUSES = tuple(cause for cause in Cause if cause)


def measure(folder: Path) -> list[Figure]:
    """Shares of candidates that are promoted."""
    return [*_no_better(), *_few_differ(), *_worse_by_the_margin(), *_better()]


def _no_better() -> Iterator[Figure]:
    """Yields the shares of candidates that are equal or 2 points worse, and escape."""
    for (num_tasks, points), escaped in product(product(SIZES, (0, -2)), ESCAPED):
        setting = Setting(num_tasks=num_tasks, points=points, escaped=escaped)
        now, before = promoted(setting)
        for shares, limit, looks in ((0, 0.03, "1 look"), (1, 0.02, f"{NUM_LOOKS} looks")):
            yield Figure(
                name=f"promoted, {setting}, {looks}",
                value=now[shares],
                limit=limit,
                is_upper=True,
                note=f"of {NUM_PAIRS}" + ("" if shares else f"; {before[0]:.3f} with failures left out"),
            )


def _few_differ() -> Iterator[Figure]:
    """Yields the shares of equal candidates that are promoted where the two differ on few tasks."""
    for num_tasks, share in FEW_DIFFER:
        rng = np.random.default_rng([num_tasks, 1])
        num_promoted = 0
        for _ in range(NUM_PAIRS):
            wins = rng.random(num_tasks) < 0.5
            differs = rng.random(num_tasks) < share
            gain = paired_interval(_named(wins), _named(wins ^ differs), num_samples=NUM_SAMPLES)
            num_promoted += _verdict(gain, None) == "promote"
        yield Figure(
            name=f"promoted, equal, {share:.0%} of {num_tasks} tasks differ",
            value=num_promoted / NUM_PAIRS,
            limit=0.03,
            is_upper=True,
            note=f"of {NUM_PAIRS}",
        )


def _worse_by_the_margin() -> Iterator[Figure]:
    """Yields the shares of candidates that the exact interval calls certainly not worse, which are worse by just the margin."""
    for num_tasks, margin in product((64, 256, 512), (0.02, 0.05)):
        rng = np.random.default_rng([num_tasks, 2])
        champion = np.ones(num_tasks, dtype=bool)
        lows = [exact_interval(_named(rng.random(num_tasks) >= margin), _named(champion)).low for _ in range(NUM_PAIRS)]
        yield Figure(
            name=f"certainly not {margin:g} worse, {num_tasks} tasks, worse by {margin:g}, mcnemar",
            value=sum(low > -margin for low in lows) / NUM_PAIRS,
            limit=0.04,
            is_upper=True,
            note=f"of {NUM_PAIRS}",
        )


def _named(solved: NDArray[np.bool_]) -> dict[str, list[float]]:
    return {str(i): [float(value)] for i, value in enumerate(solved)}


def _better() -> Iterator[Figure]:
    """Yields the shares of better candidates that escape from nothing, less those of the gate that knows no causes."""
    for num_tasks, points, missing in product(SIZES, (3, 6), (0.0, 0.01)):
        setting = Setting(num_tasks=num_tasks, points=points, missing=missing)
        now, before = promoted(setting)
        for shares, looks in ((0, "1 look"), (1, f"{NUM_LOOKS} looks")):
            yield Figure(
                name=f"power against left out, {setting}, {looks}",
                value=now[shares] - before[shares],
                limit=None if missing else -0.03,
                note=f"{now[shares]:.3f} of {NUM_PAIRS} promoted, {before[shares]:.3f} with failures left out",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes a candidate beside its champion."""

    num_tasks: int
    points: int
    """By how many points its chance of a task is higher."""
    escaped: float = 0.0
    """Share of the episodes it would lose that it ends as failed, by a cause drawn at random."""
    missing: float = 0.0
    """Share of all episodes of both teams that the infrastructure loses."""

    def __str__(self) -> str:
        left = f", {self.escaped:.0%} of losses escape" * (self.points <= 0)
        lost = f", {self.missing:.0%} of episodes missing" * (self.points > 0)
        return f"{self.points:+d} points{left}{lost}, {self.num_tasks} tasks"


def promoted(setting: Setting, *, num_pairs: int = NUM_PAIRS) -> tuple[list[float], list[float]]:
    """Returns the shares of pairs whose candidate is promoted after [one look, ten looks]: by the gate, and left out.

    The same pairs play whatever escapes and whatever is missing, so that rows differ by that alone. The ten looks of the gate
    that leaves failures out are played for better teams only; NaN for the others.
    """
    rng = np.random.default_rng([setting.num_tasks, setting.points + 100, 0])
    counts = np.zeros((2, 2))
    for _ in range(num_pairs):
        new, old = _played(setting, rng)
        with_causes, left_out = _compared(new, old, COUNTED), _compared(new, old, (Cause.NONE,))
        looks = _promotes_in_looks(left_out) if setting.points > 0 else math.nan
        counts += [
            [_promotes_at_once(with_causes), _promotes_in_looks(with_causes)],
            [_promotes_at_once(left_out), looks],
        ]
    shares = counts / num_pairs
    return shares[0].tolist(), shares[1].tolist()


Episodes = Mapping[str, tuple[float, Cause]]
"""By task, outcome and cause of failure of its episode."""


def _played(setting: Setting, rng: np.random.Generator) -> tuple[Episodes, Episodes]:
    """Returns the episodes of candidate and champion."""
    n = setting.num_tasks
    chance = rng.beta(2, 2, size=n)
    old = rng.random(n) < chance
    new = rng.random(n) < np.clip(chance + setting.points / 100, 0, 1)
    escapes = ~new & (rng.random(n) < setting.escaped)
    causes = rng.integers(0, len(CAUSES), size=n)
    lost = [rng.random(n) < setting.missing for _ in range(2)]
    candidate = {
        str(i): (float(new[i]), CAUSES[causes[i]] if escapes[i] else Cause.INFRASTRUCTURE if lost[0][i] else Cause.NONE)
        for i in range(n)
    }
    champion = {str(i): (float(old[i]), Cause.INFRASTRUCTURE if lost[1][i] else Cause.NONE) for i in range(n)}
    return candidate, champion


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Holds the outcomes of candidate and champion, as one of the two gates sees them."""

    pair: tuple[Outcomes, Outcomes]
    """On the tasks that both have an outcome for."""
    worst: tuple[Outcomes, Outcomes] | None
    """On all tasks, with the missing episodes against the candidate; None where none is missing."""
    places: NDArray[np.int64]
    """The numbers of the tasks of `pair`, ascending."""
    num_tasks: int


def _compared(new: Episodes, old: Episodes, counted: tuple[Cause, ...]) -> _Compared:
    """Compares the episodes whose causes are `counted`: the others are missing, or for the gate without causes never were."""
    sides = [{t: [value] for t, (value, cause) in side.items() if cause in counted} for side in (new, old)]
    both = [t for t in new if t in sides[0] and t in sides[1]]
    is_missing = counted == COUNTED and len(both) < len(new)
    return _Compared(
        pair=({t: sides[0][t] for t in both}, {t: sides[1][t] for t in both}),
        worst=worst_case(*sides, tasks=new, episodes_per_task=1) if is_missing else None,
        places=np.array([int(t) for t in both]),
        num_tasks=len(new),
    )


def _promotes_at_once(compared: _Compared) -> bool:
    gain = paired_interval(*compared.pair, num_samples=NUM_SAMPLES)
    bound = None if compared.worst is None else paired_interval(*compared.worst, num_samples=NUM_SAMPLES)
    return _verdict(gain, bound) == "promote"


def _promotes_in_looks(compared: _Compared) -> bool:
    gains = paired_differences(*compared.pair)
    bounds = None if compared.worst is None else paired_differences(*compared.worst)
    planned, verdict = compared.num_tasks, "inconclusive"
    per_look = -(-planned // NUM_LOOKS)
    for num_tasks in [*range(per_look, planned, per_look), planned]:
        gain = sequence_interval(gains[: np.searchsorted(compared.places, num_tasks)], planned=planned)
        bound = None if bounds is None else sequence_interval(bounds[:num_tasks], planned=planned)
        verdict = _verdict(gain, bound)
        if verdict != "inconclusive":
            break
    return verdict == "promote"


def _verdict(gain: Interval, bound: Interval | None) -> str:
    evidence = Evidence(gain=gain, bound=bound, ok_share=1.0, format_shares={})
    return decide_promotion(PromoteConfig(), evidence).verdict
