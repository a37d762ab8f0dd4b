"""pass_at_k: only the best episode of a task is reinforced, by its lead over the second best (seed-systems 2.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, members_of, per_episode
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def pass_at_k(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """[N]: (R_max - R_second) / (std_group + eps) for all turns of the group's best episode, 0 for the others.

    Episodes are compared whatever `group_by` says, each by the mean over its turns in the group: an agent called twice
    in the best one is no rival of itself. Where two are equally good there is no lead. A group of one gives 0: there is
    no second.
    """
    scores, groups, episode_of = per_episode(rows, group_keys(rows, settings, default="task"))
    out = np.zeros(len(scores))
    for members in members_of(groups):
        if len(members) < 2:
            continue
        group = scores[members]
        second, best = np.sort(group)[-2:]
        scale = group.std(ddof=settings.ddof) + settings.eps if settings.normalize_std else 1.0
        out[members[int(group.argmax())]] = (best - second) / scale
    return out[episode_of]
