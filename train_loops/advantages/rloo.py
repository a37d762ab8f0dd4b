"""rloo: compares each episode with the mean of the others of its task (REINFORCE leave-one-out, arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import Keys, group_keys, members_of, minus_mean, per_episode
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def rloo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = n / (n - 1) (R_i - mean_g), which is R_i minus the mean of the others; [1, 0, 0, 1] -> +-2/3.

    Episodes or turns are compared as in `grpo`.
    """
    if settings.group_by not in (None, "task"):
        keys = group_keys(rows, settings, default="task")
        return _leave_one_out(rows.scores, keys, settings, batch_keys=rows.agents)
    scores, groups, episode_of = per_episode(rows, rows.group_ids)
    return _leave_one_out(scores, groups, settings)[episode_of]


def _leave_one_out(
    scores: NDArray[np.float64], keys: Keys, settings: AdvantageConfig, *, batch_keys: Keys = ()
) -> NDArray[np.float64]:
    factor = np.ones(len(scores))
    for members in members_of(keys):
        factor[members] = len(members) / max(len(members) - 1, 1)
    return factor * minus_mean(scores, keys, settings, batch_keys=batch_keys)
