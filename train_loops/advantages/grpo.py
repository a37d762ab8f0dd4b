"""grpo: compares the episodes of a task (GRPO, arXiv 2402.03300; without the division Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, normalize, per_episode
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def grpo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = (S_e - mean_g) / (std_g + eps), for all turns i of the episode e of the task g.

    S_e is the mean over the episode's rows, so an episode weighs the same however many turns it has. With another
    `group_by` than `task`, turns are compared instead of episodes.
    """
    if settings.group_by not in (None, "task"):
        return normalize(rows.scores, group_keys(rows, settings, default="task"), settings, batch_keys=rows.agents)
    scores, groups, episode_of = per_episode(rows, rows.group_ids)
    return normalize(scores, groups, settings)[episode_of]
