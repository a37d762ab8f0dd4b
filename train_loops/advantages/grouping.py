"""grouping: says which rows are compared with one another, and normalises scores within these groups.

The groups are those of GRPO (arXiv 2402.03300), Dr. MAS (2602.08847), AT-GRPO (2510.11062) and SynCo's whole-batch group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig

Keys = Sequence[Hashable]
ROUNDING = 1e-9
"""Rewards that differ by less, absolutely or relatively, are the same."""


def group_keys(rows: RewardedRows, settings: AdvantageConfig, *, default: str) -> Keys:
    """Returns the group of each row, [N], by `settings.group_by`, or by `default`, the algorithm's own.

    task               all turns of a task's episodes
    task_agent         the turns of one agent in a task's episodes
    task_agent_round   the n-th calls of one agent in a task's episodes
    task_round         the turns of one round of a task's episodes, of any agent
    batch_agent        all turns of an agent in the iteration, of any task
    """
    by = settings.group_by or default
    if by == "task":
        return list(rows.group_ids)
    if by == "task_agent":
        return list(zip(rows.group_ids, rows.agents, strict=True))
    if by == "task_round":
        return list(zip(rows.group_ids, rows.episode_rounds, strict=True))
    if by == "task_agent_round":
        return list(zip(rows.group_ids, rows.agents, rows.round_indices, strict=True))
    if by == "batch_agent":
        return list(rows.agents)
    raise ValueError(
        f"advantage.group_by is {by!r}; known: task, task_agent, task_agent_round, task_round, batch_agent"
    )


def normalize(
    scores: ArrayLike, keys: Keys, settings: AdvantageConfig, *, batch_keys: Keys = ()
) -> NDArray[np.float64]:
    """Maps [N] scores to [N]: (x - mean) / (std + eps) among equal keys; only x - mean where `normalize_std` is off.

    Equal scores give exactly 0, whatever the rounding. A group of one gives what `settings.singleton` says: 0, its raw
    score, or its score normalised among all rows of equal `batch_keys` (the agents; empty: all rows).
    """
    x = np.asarray(scores, dtype=np.float64)
    out = np.zeros_like(x)
    for members in members_of(keys):
        group = x[members]
        if len(members) > 1:
            out[members] = _standardized(group, group, settings)
        elif settings.singleton == "raw":
            out[members] = group
        elif settings.singleton == "batch":
            batch = x if not batch_keys else x[[key == batch_keys[members[0]] for key in batch_keys]]
            out[members] = _standardized(group, batch, settings)
    return out


def minus_mean(
    scores: ArrayLike, keys: Keys, settings: AdvantageConfig, *, batch_keys: Keys = ()
) -> NDArray[np.float64]:
    """Maps [N] scores to [N]: x - mean among equal keys; singletons are treated as in `normalize`."""
    return normalize(scores, keys, settings.model_copy(update={"normalize_std": False}), batch_keys=batch_keys)


def are_equal(values: ArrayLike) -> bool:
    """Says whether values differ by rounding only, as sums of the same scores in another order do (0.1 + 0.2 and 0.3); NaN is not
    equal, and stays NaN."""
    x = np.asarray(values, dtype=np.float64)
    return math.isclose(x.min(), x.max(), rel_tol=ROUNDING, abs_tol=ROUNDING)


def members_of(keys: Keys) -> list[list[int]]:
    """Returns the indices of the rows of each key, keys in the order of their first row."""
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def per_episode(rows: RewardedRows, keys: Keys) -> tuple[NDArray[np.float64], list[Hashable], NDArray[np.int64]]:
    """Returns one score per episode and key [E], the key of each [E], and which of the E each row belongs to [N].

    The score of an episode whose agents earned different rewards is the mean over its turns. (The code of Dr. MAS takes that of
    its first row.)
    Of increments it is their sum: a mean would make an episode that failed late look better than one that failed early.
    """
    first: dict[tuple[Hashable, str], int] = {}
    pairs = zip(keys, rows.episode_ids, strict=True)
    episode_of = np.array([first.setdefault(pair, len(first)) for pair in pairs], dtype=np.int64)
    x = rows.scores
    of_episode = math.fsum if rows.credit_kind == "increments" else _mean
    scores = np.array([of_episode(x[members]) for members in members_of(episode_of.tolist())])
    return scores, [key for key, _ in first], episode_of


def _mean(x: NDArray[np.float64]) -> float:
    """Returns the mean, the same in any order, and exactly x where all are x.

    Episodes that earned the same must tie exactly, however many turns they have: a rounding error divided by a standard
    deviation of nearly 0 would become a large advantage.
    """
    return float(x[0]) if x.min() == x.max() else math.fsum(x) / len(x)


def _standardized(x: NDArray[np.float64], among: NDArray[np.float64], settings: AdvantageConfig) -> NDArray[np.float64]:
    if are_equal(among):
        return np.zeros_like(x)
    scale = among.std(ddof=settings.ddof) + settings.eps if settings.normalize_std else 1.0
    return (x - among.mean()) / scale
