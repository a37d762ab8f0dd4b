"""grpo: rewards compared within groups of episodes of the same task (Shao 2024; seed-systems 2.2, 2.3 "vanilla").

An episode has many turns, of several agents. GRPO compares episodes: an episode's score is the mean score of its rows
(of this model group), it is normalised over the episodes of its group, and every row of the episode gets the result.
For a comparison per agent see `dr_mas`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


def grpo(
    scores: ArrayLike,
    *,
    group_ids: Sequence[str],
    episode_ids: Sequence[str],
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
) -> NDArray[np.float64]:
    """One advantage per row, [N]: (S_episode - mean_group) / (std_group + eps), for all tokens of the row.

    Args:
        scores: [N], a row's reward (minus beta times its summed KL where KL is in the reward).
        group_ids: [N], episodes of one task in one iteration.
        episode_ids: [N].
        normalize_std: False leaves the division out (Dr. GRPO).
        ddof: 1 as in verl, 0 as in the papers.
        eps: see above.
        singleton: a group with one episode gets 0, or its raw score (what the references do).
    """
    first_row: dict[tuple[str, str], int] = {}
    episode_of = [first_row.setdefault(key, len(first_row)) for key in zip(group_ids, episode_ids, strict=True)]
    episode_scores = np.bincount(episode_of, weights=np.asarray(scores, dtype=np.float64)) / np.bincount(episode_of)
    advantages = normalize_groups(
        episode_scores,
        [group for group, _ in first_row],
        normalize_std=normalize_std,
        ddof=ddof,
        eps=eps,
        singleton=singleton,
    )
    return advantages[episode_of]


def normalize_groups(
    scores: ArrayLike,
    keys: Sequence[Hashable],
    *,
    normalize_std: bool,
    ddof: int,
    eps: float,
    singleton: Literal["zero", "raw"],
) -> NDArray[np.float64]:
    """(x - mean) / (std + eps) among equal keys, [N] -> [N]. Equal scores give exactly 0, whatever the rounding."""
    x = np.asarray(scores, dtype=np.float64)
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    out = np.zeros_like(x)
    for rows in members.values():
        group = x[rows]
        if len(rows) == 1:
            out[rows] = group if singleton == "raw" else 0.0
        elif group.min() < group.max():
            out[rows] = (group - group.mean()) / ((group.std(ddof=ddof) + eps) if normalize_std else 1.0)
    return out
