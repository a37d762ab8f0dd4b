"""gpg: subtracts the group's mean, and scales up to make good for rows without reward (GPG, arXiv 2504.02546)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, minus_mean
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def gpg(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = alpha (R_i - mean_g), alpha = rows / rows with a reward other than 0 (f_norm 1, as in verl).

    Turns are compared, not episodes: the paper has one completion per episode, and a turn keeps its own credit.
    """
    scores = rows.scores
    alpha = len(scores) / max(int(np.count_nonzero(scores)), 1)
    return alpha * minus_mean(scores, group_keys(rows, settings, default="task"), settings)
