"""statistics: outcomes per task -> means, differences and their confidence intervals. NumPy, SciPy for the exact test.

Families of tasks are the units. The k episodes of a task are averaged first, and variants of one problem are drawn together, because
neither are independent (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640). A task that names no family is one of its own.
Means are over tasks: a family of five tasks has five times the weight of a single task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.config.run_config import RunConfig
from pipelines.evaluation.betting import mean_bounds
from pipelines.tasks.splits import check_independent

Outcomes = Mapping[str, Sequence[float]]
"""task_id -> outcome of each of its episodes."""
Families = Mapping[str, str]
"""task_id -> the problem that the task is a variant of."""

FEW = 16
"""Tasks with a difference, below which the bootstrap of differences is too narrow: of equal teams, and of teams that are worse by a margin,
4 to 5% are promoted, not 2.5%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampling:
    """How an interval is found."""

    families: Families = field(default_factory=dict)
    """Of the tasks, or of more."""
    seed: int = 0
    num_samples: int = 10_000
    """Of a bootstrap, at least: see `num_drawn`."""
    confidence: float = 0.95

    @classmethod
    def of(cls, config: RunConfig, families: Families, *, confidence: float = 0.95) -> Resampling:
        """Returns how the intervals of a run are found."""
        samples = config.evaluate.bootstrap_samples
        return cls(families=families, seed=config.seed, num_samples=samples, confidence=confidence)

    @property
    def num_drawn(self) -> int:
        """The samples of a bootstrap: so many that ten lie beyond each bound, or the bound would be the outermost that was drawn."""
        return max(self.num_samples, math.ceil(10 / self.tails[0]))

    @property
    def tails(self) -> tuple[float, float]:
        """The quantiles that bound a two-sided interval."""
        return (1 - self.confidence) / 2, (1 + self.confidence) / 2


RESAMPLING = Resampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its two-sided confidence interval."""

    mean: float
    low: float
    high: float
    num_tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def ci95(self) -> list[float]:
        """`[low, high]`, as JSON reports carry it."""
        return [self.low, self.high]


def mean_interval(
    outcomes: Outcomes,
    how: Resampling = RESAMPLING,
) -> Interval:
    """Mean over tasks of the mean over their episodes (avg@k), with outcomes in [0, 1]; BCa bootstrap.

    Raises ValueError without tasks, for a task without episodes or an outcome that is not finite.
    """
    units = _units(outcomes, task_means(outcomes), how.families)
    return _bootstrap(units, how, bounds=(0.0, 1.0))


def paired_interval(
    candidate: Outcomes,
    champion: Outcomes,
    how: Resampling = RESAMPLING,
) -> Interval:
    """Mean over tasks of candidate minus champion on the same task: what decisions rest on.

    Where each task has one outcome of 0 or 1 and is a family of its own, a bootstrap misses the mean as rarely as it says, unless few
    tasks differ: then the interval is the exact one. Any other differences are bounded by bets (`betting.py`), which hold for every
    distribution on [-1, 1]. Where an outcome beyond [0, 1] was seen on either side, the range of all outcomes takes the place of 1: what was
    never seen beyond it is not allowed for.

    Raises ValueError, besides what `mean_interval` does, when the two did not solve the same tasks.
    """
    differences = paired_differences(candidate, champion)
    units = _units(candidate, differences, how.families)
    if (
        all(len(v) == 1 and v[0] in (0.0, 1.0) for side in (candidate, champion) for v in side.values())
        and units.are_single
    ):
        return _few_or_bootstrapped(units, how)
    # A file may be sorted by difficulty; bets need an order by chance, and the same one at each call.
    order = np.argsort([sha256(name.encode()).hexdigest() for name in units.names])
    return _bet(
        units,
        order,
        span=_span(candidate, champion),
        largest=int(units.counts.max()),
        planned=len(order),
        confidence=how.confidence,
    )


def paired_sequence(
    candidate: Outcomes,
    champion: Outcomes,
    how: Resampling = RESAMPLING,
    *,
    planned: int,
) -> Interval:
    """The same mean with an interval that holds at all numbers of tasks at once, however often it is looked at.

    An interval for a fixed number of tasks that is looked at repeatedly, until a team may be promoted, promotes by chance far more
    often than its confidence says: 5% become 18% with ten looks.

    Args:
        candidate: in the order in which the tasks are played, which must be one by chance. No family is looked at in part.
        how: its families are those of all the planned tasks. Stakes depend on how many families they are, and how large; what differed from look to look
            would be another bet at each.

    Raises ValueError as `paired_interval` does.
    """
    units = _units(candidate, paired_differences(candidate, champion), how.families)
    sizes = Counter(how.families.values())
    planned += len(sizes) - sizes.total()
    return _bet(
        units,
        np.arange(len(units.names)),
        span=_span(candidate, champion),
        largest=max(sizes.values(), default=1),
        planned=planned,
        confidence=how.confidence,
    )


def paired_bootstrap(
    candidate: Outcomes,
    champion: Outcomes,
    how: Resampling = RESAMPLING,
) -> Interval:
    """The same mean of any figures, without a range: an interval for figures in which a candidate must not be worse.

    It says nothing of what was not drawn: where the two have the same figure on every task, the interval has width 0. Raises ValueError as
    `paired_interval` does.
    """
    units = _units(candidate, paired_differences(candidate, champion), how.families)
    return _bootstrap(units, how, bounds=(0.0, 0.0))


def paired_differences(candidate: Outcomes, champion: Outcomes) -> np.ndarray:
    """[num_tasks]: candidate minus champion, each the mean of its episodes; raises as `paired_interval` does."""
    if candidate.keys() != champion.keys():
        only = sorted(candidate.keys() ^ champion.keys())
        raise ValueError(f"a paired comparison needs the same tasks on both sides; {len(only)} differ, as {only[:3]}")
    return task_means(candidate) - task_means({task_id: champion[task_id] for task_id in candidate})


def paired_ratio(
    candidate: Outcomes,
    champion: Outcomes,
    how: Resampling = RESAMPLING,
    *,
    least: float = 0.0,
) -> Interval | None:
    """Mean over tasks of the candidate's figure over that of the champion's; percentile bootstrap of the families.

    None where both means are 0, or the champion's is and `least`, too. Raises ValueError as `paired_interval` does.

    Args: least: a mean of the champion's below it counts as this, with the same difference: twice nothing is no change.
    """
    differences = paired_differences(candidate, champion)
    old = task_means({task_id: champion[task_id] for task_id in candidate})
    usual = max(float(old.mean()), least)
    if not usual > 0 or not (old.any() or differences.any()):
        return None
    units = [_units(candidate, values, how.families) for values in (old, differences)]
    below_of, above_of = (unit.means * unit.counts for unit in units)
    below, above, num = _resampled_sums(
        below_of, above_of, units[0].counts, rng=np.random.default_rng(how.seed), num_samples=how.num_drawn
    )
    below = np.maximum(below, least * num)
    ratios = 1 + above[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, how.tails)
    return Interval(mean=1 + float(differences.mean() / usual), low=float(low), high=float(high), num_tasks=len(old))


def by_family(tasks: Iterable[str], values: NDArray[np.float64], families: Families) -> NDArray[np.float64]:
    """Returns values [num_families] to resample in place of those of the tasks: their plain mean is the mean over tasks."""
    return _units(tasks, values, families).weighted()


class _Units(NamedTuple):
    """Values of tasks, by family, in the order of their first tasks."""

    names: list[str]
    means: NDArray[np.float64]
    counts: NDArray[np.int64]
    """Tasks of each."""

    @property
    def are_single(self) -> bool:
        """Returns whether no two tasks are of one family."""
        return bool((self.counts == 1).all())

    @property
    def mean(self) -> float:
        """Returns the mean over tasks."""
        return float(self.means @ self.counts / self.counts.sum())

    def weighted(self) -> NDArray[np.float64]:
        """Returns values, one per family, whose plain mean and its spread are those of the mean over tasks: a ratio of sums, linearised."""
        if self.are_single:
            return self.means
        share = self.counts / self.counts.mean()
        return self.mean + share * (self.means - self.mean)


def _units(tasks: Iterable[str], values: NDArray[np.float64], families: Families) -> _Units:
    names = [families.get(task_id, task_id) for task_id in tasks]
    counts = Counter(names)
    if len(counts) == len(names):
        return _Units(names, values, np.ones(len(names), dtype=np.int64))
    sums = dict.fromkeys(names, 0.0)
    for name, value in zip(names, values, strict=True):
        sums[name] += value
    means = [total / counts[name] for name, total in sums.items()]
    return _Units(list(sums), np.array(means), np.array([counts[name] for name in sums]))


def _span(*sides: Outcomes) -> float:
    """Returns how far apart two outcomes may be: 1, or more where some were beyond [0, 1]."""
    seen = [value for side in sides for values in side.values() for value in values]
    return max(1.0, *seen) - min(0.0, *seen)


def _bet(
    units: _Units, order: NDArray[np.int64], *, span: float, largest: int, planned: int, confidence: float
) -> Interval:
    """Args: span: the largest difference. largest: number of tasks of the largest family."""
    means, counts = units.means[order], units.counts[order]
    low, high = mean_bounds(means / span, weights=counts / largest, planned=planned, confidence=confidence)
    return Interval(mean=units.mean, low=low * span, high=high * span, num_tasks=int(counts.sum()))


def _few_or_bootstrapped(units: _Units, how: Resampling) -> Interval:
    """The bootstrap's interval of differences of -1, 0 and 1; the exact one where few differ: 3 tasks won and none lost would do."""
    if np.count_nonzero(units.means) < FEW:
        return _exact(units.means, how.confidence)
    return _bootstrap(units, how, bounds=(-1.0, 1.0))


def exact_interval(candidate: Outcomes, champion: Outcomes, how: Resampling = RESAMPLING) -> Interval:
    """Mean of the paired difference of outcomes 0 and 1, one episode per task, by the exact McNemar test.

    Of the tasks on which the two differ, the share that the candidate wins has a Clopper-Pearson interval, and so has the share of
    such tasks; the bounds are the products that are farthest out. The interval excludes 0 just where the test does.
    Raises ValueError, besides what `paired_interval` does, for other outcomes, more episodes, or two tasks of one family.
    """
    check_independent(candidate, how.families)
    for side in (candidate, champion):
        for task_id, values in side.items():
            if len(values) != 1 or values[0] not in (0.0, 1.0):
                raise ValueError(
                    f"task {task_id!r} has the outcomes {[float(x) for x in values[:5]]}: the exact test (evaluate.test: mcnemar) needs "
                    "one episode per task and outcomes of 0 or 1; use evaluate.test: auto"
                )
    return _exact(paired_differences(candidate, champion), how.confidence)


def _exact(differences: NDArray[np.float64], confidence: float) -> Interval:
    n, won, lost = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    if not won + lost:
        unseen = _never_seen(n, confidence)
        return Interval(mean=0.0, low=-unseen, high=unseen, num_tasks=n)
    low, high = exact_share(won, won + lost, confidence=confidence)
    least, most = exact_share(won + lost, n, confidence=confidence)
    below, above = 2 * low - 1, 2 * high - 1
    return Interval(
        mean=(won - lost) / n,
        low=below * (most if below < 0 else least),
        high=above * (most if above > 0 else least),
        num_tasks=n,
    )


def _never_seen(n: int, confidence: float) -> float:
    """The share that what n draws never showed may still have: 1 - (alpha/2)^(1/n), "rule of three"."""
    return 1.0 - ((1.0 - confidence) / 2) ** (1.0 / n)


def exact_share(num_won: int, num: int, *, confidence: float) -> tuple[float, float]:
    """Returns the exact two-sided interval of a binomial share (Clopper and Pearson 1934)."""
    from scipy.stats import binomtest

    interval = binomtest(num_won, num).proportion_ci(confidence_level=confidence, method="exact")
    return float(interval.low), float(interval.high)


def _resampled_sums(*values: np.ndarray, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """[len(values), num_samples] sums of arrays of n values over n draws with replacement, the same ones for all arrays."""
    n = len(values[0])
    draws = (rng.multinomial(n, np.full(n, 1 / n), size=size) for size in _chunks(n, num_samples))
    return np.concatenate([np.stack(values) @ drawn.T for drawn in draws], axis=1)


def _chunks(n: int, num_samples: int) -> list[int]:
    """Numbers of resamples of n values that are drawn at once, so that they fit into memory."""
    chunk = max(1, 4_000_000 // n)
    return [min(chunk, num_samples - start) for start in range(0, num_samples, chunk)]


def task_means(outcomes: Outcomes) -> np.ndarray:
    """[num_tasks]: mean outcome of each task, in the order of the mapping."""
    empty = next((task_id for task_id, values in outcomes.items() if len(values) == 0), None)
    if not outcomes or empty is not None:
        raise ValueError("no outcomes to average" if empty is None else f"task {empty!r} has no outcome to average")
    means = np.array([math.fsum(values) / len(values) for values in outcomes.values()])
    if not np.isfinite(means).all():
        bad = list(outcomes)[int(np.flatnonzero(~np.isfinite(means))[0])]
        raise ValueError(f"task {bad!r} has an outcome that is not a finite number: {list(outcomes[bad])[:5]}")
    return means


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Chance that one of k episodes solves its task, mean over tasks: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021).

    An episode solves its task with outcome 1. Raises ValueError where a task has fewer than k episodes.
    """
    task_means(outcomes)
    shares = []
    for task_id, values in outcomes.items():
        n, c = len(values), sum(value >= 1.0 for value in values)
        if n < k:
            raise ValueError(f"pass@{k} needs {k} episodes per task, {task_id!r} has {n}")
        shares.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return math.fsum(shares) / len(shares)


def pass_curve(outcomes: Outcomes) -> dict[int, float]:
    """`pass_at_k` by k, from 1 to the fewest episodes that a task has; empty without tasks."""
    fewest = min((len(values) for values in outcomes.values()), default=0)
    return {k: pass_at_k(outcomes, k) for k in range(1, fewest + 1)}


def _bootstrap(units: _Units, how: Resampling, *, bounds: tuple[float, float]) -> Interval:
    """BCa bootstrap of the mean (Efron 1987), of which the units are drawn.

    Values that are all equal show no spread to resample, yet prove little when they are few: then the interval is
    what a value never seen in n draws may still weigh at either bound.
    """
    num_tasks, num_samples = int(units.counts.sum()), how.num_drawn
    order = np.lexsort(
        (units.counts, units.means)
    )  # draws are by place: the same in another order is the same evidence
    values, counts = units.weighted()[order], units.counts[order]
    n, mean = len(values), float(values.mean())
    if np.ptp(values) < 1e-12:
        unseen = _never_seen(n, how.confidence)
        low, high = mean + unseen * (min(bounds[0], mean) - mean), mean + unseen * (max(bounds[1], mean) - mean)
        return Interval(mean=mean, low=low, high=high, num_tasks=num_tasks)
    rng = np.random.default_rng(how.seed)
    if np.ptp(counts) == 0:
        means = _resampled_means(values, rng, num_samples)
    else:  # as a ratio of sums: the mean of `values` may lie beyond every outcome where families differ in size
        sums, sizes = _resampled_sums(counts * units.means[order], counts, rng=rng, num_samples=num_samples)
        means = sums / sizes
    normal = NormalDist()
    rounding = 1e-12 * float(np.abs(values).max())  # means of thirds that are equal differ in their last bits
    below = ((means < mean - rounding).sum() + (means <= mean + rounding).sum()) / (2 * num_samples)
    bias = normal.inv_cdf(min(max(below, 1 / num_samples), 1 - 1 / num_samples))
    centred = values - mean
    # Acceleration of the mean from its jackknife, in closed form: sum(d^3) / (6 sum(d^2)^(3/2)).
    acceleration = float((centred**3).sum() / (6.0 * (centred**2).sum() ** 1.5))

    def level(z: float) -> float:
        return normal.cdf(bias + (bias + z) / (1.0 - acceleration * (bias + z)))

    levels = [level(normal.inv_cdf(tail)) for tail in how.tails]
    low, high = np.quantile(means, levels)
    return Interval(mean=mean, low=float(low), high=float(high), num_tasks=num_tasks)


def _resampled_means(values: np.ndarray, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """[num_samples] means of n draws with replacement.

    Few different values (accuracies: k + 1 of them) are drawn as multinomial counts, which is the same and far faster.
    """
    n = len(values)
    levels, counts = np.unique(values, return_counts=True)
    if len(levels) <= n // 8:
        return rng.multinomial(n, counts / n, size=num_samples) @ levels / n
    draws = (rng.integers(0, n, size=(size, n), dtype=np.int32) for size in _chunks(n, num_samples))
    return np.concatenate([values[drawn].mean(axis=1) for drawn in draws])
