"""remax: compares a turn with the same turn of the task's greedy episode (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def remax(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: A_t = sum_{k >= t} r_k - b, one value per completion token; see `against_baseline`.

    b is the reward of the same agent's turn of the same round in the task's greedy episode. Where that episode has no such
    turn, b is its outcome (0 for increments); see `train_loops.signal.baselines`.
    """
    return against_baseline(rows)
