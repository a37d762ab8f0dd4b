"""confidence_sequence: paired differences that come in steps -> an interval that may be looked at after each of them.

An interval for a fixed number of tasks that is looked at repeatedly, until a team may be promoted, promotes by chance far
more often than its confidence says: 5% become 18% with ten looks. Here the chance that the interval ever misses the mean,
at any number of tasks, is at most 1 - confidence, however often it is looked at (Waudby-Smith and Ramdas, "Estimating means
of bounded random variables by betting", arXiv 2010.09686). The price is a wider interval: `python -m tests.bench --only gate`
measures it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipelines.evaluation.statistics import Interval, Outcomes, paired_differences

RESOLUTION = 1e-4
"""Grid of the bounds, which are rounded outwards."""
VARIANCE = 0.3
"""Variance of a task's difference that bets are made for: two teams that disagree on a third of the tasks. With another
variance the interval still holds, but is wider."""


def paired_sequence(candidate: Outcomes, champion: Outcomes, *, planned: int, confidence: float = 0.95) -> Interval:
    """Mean over tasks of candidate minus champion, both in [0, 1]; the interval holds at all numbers of tasks at once.

    Each side has half of 1 - confidence for itself. The order of the tasks does not matter.

    Args:
        planned: tasks after which the evaluation is to end, for which the bets are best. The interval holds beyond them, too.

    Raises ValueError as `paired_interval` does, and for an outcome outside [0, 1].
    """
    differences = paired_differences(candidate, champion)
    for task_id, difference in zip(candidate, differences, strict=True):
        if not -1 <= difference <= 1:
            raise ValueError(
                f"task {task_id!r}: outcomes differ by {difference:g}; evaluate.tasks_per_look needs outcomes between 0 and 1"
            )
    return sequence_interval(differences, planned=planned, confidence=confidence)


def sequence_interval(differences: NDArray[np.float64], *, planned: int, confidence: float = 0.95) -> Interval:
    """Returns what `paired_sequence` does, for the differences themselves, [num_tasks], each in [-1, 1]."""
    levels, counts = np.unique(differences, return_counts=True)
    threshold = math.log(2 / (1 - confidence))
    stakes = math.sqrt(2 * threshold / (planned * VARIANCE)) * np.geomspace(0.6, 1.7, 7)
    return Interval(
        mean=float(differences.mean()),
        low=_bound(levels, counts, stakes, threshold),
        high=-_bound(-levels, counts, stakes, threshold),
        num_tasks=len(differences),
    )


def _bound(
    levels: NDArray[np.float64], counts: NDArray[np.int64], stakes: NDArray[np.float64], threshold: float
) -> float:
    """The largest mean that bets against every smaller one have refuted; wealth falls with it, hence bisection."""
    low, high = -1.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        if _log_wealth(levels, counts, stakes, middle) >= threshold:
            low = middle
        else:
            high = middle
    return low


def _log_wealth(
    levels: NDArray[np.float64], counts: NDArray[np.int64], stakes: NDArray[np.float64], mean: float
) -> float:
    """log of the average over stakes s of prod_tasks (1 + s (d - mean)), s at most 0.98 / (1 + mean).

    If the true mean is at most `mean`, each product is a supermartingale that starts at 1 and, because d >= -1, is never
    negative; so is their average. The chance that it ever reaches x is at most 1 / x (Ville's inequality).
    """
    stakes = np.minimum(stakes, 0.98 / (1 + mean)) if mean > -1 else stakes
    logs = np.log1p(np.outer(stakes, levels - mean)) @ counts
    top = logs.max()
    return float(top + np.log(np.exp(logs - top).mean()))
