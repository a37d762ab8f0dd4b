"""gate: how often it promotes a team that is no better, also one that fails instead of losing, and how often one that is better.

Two teams play the same tasks, one episode each, and solve a task with a chance of the task's own; the candidate's is higher or
lower by some points. A candidate that escapes ends a share of the episodes that it would lose as failed, by any cause. The gate
decides once, or looks ten times. Floors and guards are off, so that the interval alone decides. "Left out" is the gate that knows
no causes: every failed episode drops out of the comparison.

Teams one iteration apart often differ on few tasks. Three more tables are of equal teams that differ so, of teams that are worse by just the
margin of `promote.non_inferiority`, and of runs in which each candidate is one point worse than the champion that it meets.

Three tables are of graded outcomes and of variants of one problem: candidates that score 0 on a few tasks and gain a little on others, so
that they are no better; equal teams whose tasks come in families, the members of which have one difference; and candidates that are better.
The note beside each has what a bootstrap of single tasks would have promoted. `lasting_falls` and `decisive_turns` have what `troupe watch` and
`troupe why` find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.config.sections import PromoteConfig
from pipelines.evaluation.gate import Evidence, decide_promotion, margin_after, worst_case
from pipelines.evaluation.statistics import (
    Interval,
    Outcomes,
    Resampling,
    exact_interval,
    paired_bootstrap,
    paired_interval,
    paired_sequence,
)
from stores.types import COUNTED, Cause
from tests.bench import decisive_turns, lasting_falls
from tests.bench.figures import Figure

NUM_PAIRS, NUM_LOOKS, NUM_SAMPLES = 1000, 10, 2000
SIZES = (512, 2048)
MOST_LOOKED_AT = 512
"""Tasks at which repeated looks are simulated; those at 2,048 would take an hour."""
FEW_DIFFER = ((64, 0.04), (128, 0.04), (256, 0.02), (512, 0.01))
"""Numbers of tasks, and the share of them on which the teams differ."""
ESCAPED = (0.0, 0.05, 0.09, 0.2, 0.3)
CAUSES = tuple(cause for cause in Cause if cause)


def measure(folder: Path) -> list[Figure]:
    """Shares of candidates that are promoted."""
    return [
        *_no_better(),
        *_few_differ(),
        *_worse_by_the_margin(),
        *_ever_worse(),
        *_rarely_at_0(),
        *_of_families(),
        *_better_by_degrees(),
        *_better(),
        *lasting_falls.figures(),
        *decisive_turns.figures(),
    ]


def _no_better() -> Iterator[Figure]:
    """Yields the shares of candidates that are equal or 2 points worse, and escape."""
    for (num_tasks, points), escaped in product(product(SIZES, (0, -2)), ESCAPED):
        setting = Setting(num_tasks=num_tasks, points=points, escaped=escaped)
        now, before = promoted(setting)
        for shares, looks in _looks(setting):
            yield Figure(
                f"promoted, {setting}, {looks}",
                now[shares],
                most=0.03,
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
            gain = paired_interval(_named(wins), _named(wins ^ differs), Resampling(num_samples=NUM_SAMPLES))
            num_promoted += _verdict(gain, None) == "promote"
        yield Figure(
            f"promoted, equal, {share:.0%} of {num_tasks} tasks differ",
            num_promoted / NUM_PAIRS,
            most=0.03,
            note=f"of {NUM_PAIRS}",
        )


def _worse_by_the_margin() -> Iterator[Figure]:
    """Yields the shares of candidates that the exact interval calls certainly not worse, which are worse by just the margin."""
    for num_tasks, margin in product((64, 256, 512), (0.02, 0.05)):
        rng = np.random.default_rng([num_tasks, 2])
        champion = np.ones(num_tasks, dtype=bool)
        lows = [exact_interval(_named(rng.random(num_tasks) >= margin), _named(champion)).low for _ in range(NUM_PAIRS)]
        yield Figure(
            f"certainly not {margin:g} worse, {num_tasks} tasks, worse by {margin:g}, mcnemar",
            sum(low > -margin for low in lows) / NUM_PAIRS,
            most=0.04,
            note=f"of {NUM_PAIRS}",
        )

    for num_tasks, margin, won in product((20, 50, 100, 200), (0.05, 0.1), (0.0, 0.05, 0.2)):
        rng = np.random.default_rng([num_tasks, round(margin * 100), round(won * 100), 2])
        promote, num_promoted = PromoteConfig(non_inferiority=margin), 0
        for _ in range(NUM_PAIRS):
            kinds = rng.choice(3, num_tasks, p=[1 - margin - 2 * won, won, margin + won])
            gain = paired_interval(_named(kinds == 1), _named(kinds == 2), Resampling(num_samples=NUM_SAMPLES))
            num_promoted += _verdict(gain, None, promote) == "promote"
        yield Figure(
            f"certainly not {margin:g} worse, {num_tasks} tasks, worse by {margin:g}, wins {won:.0%}",
            num_promoted / NUM_PAIRS,
            most=0.03,
            note=f"of {NUM_PAIRS}",
        )


def _ever_worse() -> Iterator[Figure]:
    """Yields how often 20 candidates, each one point worse than the champion that it meets, bring a run down by more than the margin."""
    rng, promote, num_runs = np.random.default_rng(9), PromoteConfig(non_inferiority=0.05), 100
    num_too_low = np.zeros(2)
    for _ in range(num_runs):
        spent, points_lost = 0.0, np.zeros(2)
        for _ in range(20):
            kinds = rng.choice(3, 500, p=[0.89, 0.05, 0.06])
            gain = paired_interval(_named(kinds == 1), _named(kinds == 2), Resampling(num_samples=NUM_SAMPLES))
            is_promoted = [_verdict(gain, None, promote, of_margin) == "promote" for of_margin in (spent, 0.0)]
            spent = margin_after(spent, gain.low) if is_promoted[0] else spent
            points_lost += is_promoted
        num_too_low += points_lost > 5
    now, before = num_too_low / num_runs
    yield Figure(
        "runs of 20 candidates, each 1 point worse, that lose more than the margin of 5",
        now,
        most=0.03,
        note=f"of {num_runs}; {before:.3f} where each has the whole margin",
    )


CHAMPION = 0.6
"""Its graded outcome on every task, as the differences alone matter."""
RARE = tuple((num, share) for num in (20, 50, 100, 200, 500) for share in (0.05, 0.02, 0.01, 0.005))
GRADED_PAIRS = 400


def _rarely_at_0() -> Iterator[Figure]:
    """Yields the shares of candidates that are promoted which score 0 on a share of the tasks, and are no better on the whole."""
    for (num_tasks, share), (moved, points) in product(RARE, ((1.0, 0), (0.08, 0), (1.0, -2))):
        won = (share * CHAMPION / (1 - share) + points / 100) / moved  # on tasks that move
        if won < 0:
            continue  # worse everywhere
        rng = np.random.default_rng([num_tasks, round(share * 1000), 3])
        promoted_by = np.zeros(2)
        for _ in range(GRADED_PAIRS):
            fails, moves = rng.random(num_tasks) < share, rng.random(num_tasks) < moved
            pair = _graded(np.where(fails, -CHAMPION, np.where(moves, min(won, 1 - CHAMPION), 0.0)))
            promoted_by += _promotes(pair)
        now, before = promoted_by / GRADED_PAIRS
        moving = f", {moved:.0%} of tasks move" if moved < 1 else ""
        yield Figure(
            f"promoted, {points:+d} points, 0 on {share:.1%} of {num_tasks} tasks{moving}",
            now,
            most=0.03,
            note=f"of {GRADED_PAIRS}; {before:.3f} by the bootstrap",
        )


def _of_families() -> Iterator[Figure]:
    """Yields the shares of equal teams that are promoted where the tasks of a family have one difference."""
    for size, num_tasks, is_graded in product((2, 3, 4, 5), (50, 100, 200, 500), (False, True)):
        rng = np.random.default_rng([num_tasks, size, 4])
        promoted_by = np.zeros(2)
        for _ in range(GRADED_PAIRS):
            shared = rng.uniform(-0.4, 0.4, num_tasks // size) if is_graded else rng.integers(-1, 2, num_tasks // size)
            differences = np.repeat(shared, size)
            families = {str(i): str(i // size) for i in range(num_tasks)}
            pair = _graded(differences) if is_graded else (_named(differences > 0), _named(differences < 0))
            promoted_by += _promotes(pair, families)
        now, before = promoted_by / GRADED_PAIRS
        yield Figure(
            f"promoted, equal, {num_tasks} tasks in families of {size}, {'graded' if is_graded else '0 or 1'}",
            now,
            most=0.03,
            note=f"of {GRADED_PAIRS}; {before:.3f} by the bootstrap of tasks",
        )


def _better_by_degrees() -> Iterator[Figure]:
    """Yields the shares of better candidates with graded outcomes that are promoted, less those of the bootstrap."""
    for spread, points, num_tasks in product((0.15, 0.3), (3, 6, 10), (50, 100, 200, 500)):
        rng = np.random.default_rng([num_tasks, points, round(spread * 100), 5])
        promoted_by = np.zeros(2)
        for _ in range(GRADED_PAIRS):
            differences = np.clip(rng.normal(points / 100, spread, num_tasks), -CHAMPION, 1 - CHAMPION)
            promoted_by += _promotes(_graded(differences))
        now, before = promoted_by / GRADED_PAIRS
        yield Figure(
            f"power against the bootstrap, graded, {points:+d} points, spread {spread:g}, {num_tasks} tasks",
            now - before,
            note=f"{now:.3f} of {GRADED_PAIRS} promoted, {before:.3f} by the bootstrap",
        )


def _promotes(pair: tuple[Outcomes, Outcomes], families: Mapping[str, str] | None = None) -> NDArray[np.float64]:
    """Returns whether the gate promotes, and whether it would with a bootstrap of single tasks."""
    now = paired_interval(*pair, Resampling(families=families or {}, num_samples=NUM_SAMPLES))
    before = paired_bootstrap(*pair, Resampling(num_samples=NUM_SAMPLES))
    return np.array([_verdict(interval, None) == "promote" for interval in (now, before)], dtype=float)


def _graded(differences: NDArray[np.float64]) -> tuple[Outcomes, Outcomes]:
    ids = [str(i) for i in range(len(differences))]
    return {t: [CHAMPION + d] for t, d in zip(ids, differences, strict=True)}, {t: [CHAMPION] for t in ids}


def _named(solved: NDArray[np.bool_]) -> dict[str, list[float]]:
    return {str(i): [float(value)] for i, value in enumerate(solved)}


def _better() -> Iterator[Figure]:
    """Yields the shares of better candidates that escape from nothing, less those of the gate that knows no causes."""
    for num_tasks, points, missing in product(SIZES, (3, 6), (0.0, 0.01)):
        setting = Setting(num_tasks=num_tasks, points=points, missing=missing)
        now, before = promoted(setting)
        for shares, looks in _looks(setting):
            yield Figure(
                f"power against left out, {setting}, {looks}",
                now[shares] - before[shares],
                least=None if missing else -0.03,
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


def _looks(setting: Setting) -> list[tuple[int, str]]:
    """Returns the places of the shares that `promoted` measures, and their names."""
    return [(0, "1 look"), (1, f"{NUM_LOOKS} looks")][: 1 + (setting.num_tasks <= MOST_LOOKED_AT)]


def promoted(setting: Setting, *, num_pairs: int = NUM_PAIRS) -> tuple[list[float], list[float]]:
    """Returns the shares of pairs whose candidate is promoted after [one look, ten looks]: by the gate, and left out.

    The same pairs play whatever escapes and whatever is missing, so that rows differ by that alone. The ten looks of the gate
    that leaves failures out are played for better teams only, and no looks at more than `MOST_LOOKED_AT` tasks; NaN for the others.
    """
    rng = np.random.default_rng([setting.num_tasks, setting.points + 100, 0])
    counts = np.zeros((2, 2))
    for _ in range(num_pairs):
        new, old = _played(setting, rng)
        with_causes, left_out = _compared(new, old, COUNTED), _compared(new, old, (Cause.NONE,))
        is_looked_at = setting.num_tasks <= MOST_LOOKED_AT
        counts += [
            [_promotes_at_once(with_causes), _promotes_in_looks(with_causes) if is_looked_at else math.nan],
            [
                _promotes_at_once(left_out),
                _promotes_in_looks(left_out) if is_looked_at and setting.points > 0 else math.nan,
            ],
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
    gain = paired_interval(*compared.pair, Resampling(num_samples=NUM_SAMPLES))
    bound = None if compared.worst is None else paired_interval(*compared.worst, Resampling(num_samples=NUM_SAMPLES))
    return _verdict(gain, bound) == "promote"


def _promotes_in_looks(compared: _Compared) -> bool:
    planned = compared.num_tasks
    per_look = -(-planned // NUM_LOOKS)
    # A bound never falls from look to look, so that who is not promoted at the last look is promoted at none.
    if _verdict_at(compared, planned) != "promote":
        return False
    verdicts = (_verdict_at(compared, num_tasks) for num_tasks in range(per_look, planned, per_look))
    return next((verdict for verdict in verdicts if verdict != "inconclusive"), "promote") == "promote"


def _verdict_at(compared: _Compared, num_tasks: int) -> str:
    """Returns what the gate says after the first tasks."""
    gain = _sequence(compared.pair, int(np.searchsorted(compared.places, num_tasks)), planned=compared.num_tasks)
    return _verdict(gain, compared.worst and _sequence(compared.worst, num_tasks, planned=compared.num_tasks))


def _sequence(pair: tuple[Outcomes, Outcomes], num: int, *, planned: int) -> Interval:
    new, old = (dict(islice(side.items(), num)) for side in pair)
    return paired_sequence(new, old, planned=planned)


def _verdict(
    gain: Interval, bound: Interval | None, promote: PromoteConfig = PromoteConfig(), margin_spent: float = 0.0
) -> str:
    evidence = Evidence(gain=gain, bound=bound, ok_share=1.0, format_shares={}, margin_spent=margin_spent)
    return decide_promotion(promote, evidence).verdict
