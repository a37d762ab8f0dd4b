"""pass_at_k: reinforces only the best episode of a task, by its lead over the second best (arXiv 2503.19595)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, members_of, per_episode
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def pass_at_k(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: (R_max - R_second) / (std_g + eps) for all turns of the group's best episode, 0 for the others.

    Episodes are compared whatever `group_by` says, each by the mean over its turns in the group, so that an agent that is
    called twice in the best episode does not compete with itself. If two episodes tie, the lead is 0. A group of one
    gives 0, because it has no second.
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
