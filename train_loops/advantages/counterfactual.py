"""counterfactual: compares a turn with replays of the episode in which this turn alone was sampled anew.

This is the baseline of COMA (arXiv 1705.08926), estimated by replay instead of a critic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def counterfactual(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: A_t = sum_{k >= t} r_k - mean(reward of the turn in the replays); without a replay 0."""
    return against_baseline(rows)
