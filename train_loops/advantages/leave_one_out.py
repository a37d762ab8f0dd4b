"""leave_one_out: what a turn earned against a replay of the episode without its agent's contribution (difference rewards)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def leave_one_out(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Per row and token: see `against_baseline`; turns of which no variant was played get 0."""
    return against_baseline(rows)
