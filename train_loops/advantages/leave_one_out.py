"""leave_one_out: compares a turn with a replay of the episode without its agent's contribution.

These are difference rewards (Wolpert and Tumer 1999, arXiv cs/9908014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def leave_one_out(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: A_t = sum_{k >= t} r_k - mean(outcome of the replays without the agent); without a replay 0."""
    return against_baseline(rows)
