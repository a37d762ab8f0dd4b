"""remax: compares an episode with the greedy episode of its task (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def remax(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: A_t = sum_{k >= t} r_k - R_greedy, one value per completion token; see `against_baseline`."""
    return against_baseline(rows)
