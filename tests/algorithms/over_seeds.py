"""over_seeds: paired differences of several training seeds -> their mean with an interval over seeds and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.evaluation.statistics import RESAMPLING, Interval, Resampling, by_family


def interval_over_seeds(
    differences: Sequence[Mapping[str, float]],
    how: Resampling = RESAMPLING,
) -> Interval:
    """Mean over seeds and tasks of paired differences, one mapping task_id -> difference per training seed.

    Seeds are resampled, because a seed's training is shared by all its tasks. Where all seeds solved the same tasks, these are resampled
    for all of them at once (crossed), because a task's difficulty is shared, too; where each had tasks of its own, within each seed
    (nested). Percentile bootstrap; three seeds say little of how others would go. `num_tasks` counts different tasks.
    Raises ValueError without seeds or for one without tasks.
    """
    if not differences or not all(differences):
        raise ValueError("no differences to average: at least one seed, and one task of each, are needed")
    rng, num_seeds = np.random.default_rng(how.seed), len(differences)
    of_seed = _resampled(rng, num_seeds, how)
    tasks = sorted(differences[0])
    if all(sorted(by_task) == tasks for by_task in differences):
        by_seed = [by_family(tasks, np.array([d[task] for task in tasks]), how.families) for d in differences]
        drawn = _resampled(rng, len(by_seed[0]), how)
        means = np.einsum("bs,st,bt->b", of_seed, np.stack(by_seed), drawn, optimize=True)
    else:
        by_seed = [by_family(d, np.array(list(d.values())), how.families) for d in differences]
        of_tasks = [_resampled(rng, len(values), how) @ values for values in by_seed]
        means = (of_seed * np.stack(of_tasks, axis=1)).sum(axis=1)
    mean = np.mean([math.fsum(by_task.values()) / len(by_task) for by_task in differences])
    low, high = np.quantile(means, how.tails)
    num_tasks = len({task for by_task in differences for task in by_task})
    return Interval(mean=float(mean), low=float(low), high=float(high), num_tasks=num_tasks)


def _resampled(rng: np.random.Generator, num: int, how: Resampling) -> np.ndarray:
    """Returns the share that each of `num` things has in each resample, [num_samples, num]."""
    return rng.multinomial(num, np.full(num, 1 / num), size=how.num_samples) / num
