"""remax: what an episode earned against what the greedy episode of its task earned (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def remax(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Per row and token: sum of the rewards from there to the row's end, minus the greedy episode's; see `against_baseline`."""
    return against_baseline(rows)
