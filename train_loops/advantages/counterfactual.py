"""counterfactual: what a turn earned against replays of the episode in which this turn was sampled anew (COMA's baseline, arXiv 1705.08926)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.against_baseline import against_baseline
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def counterfactual(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Per row and token: see `against_baseline`; turns of which no variant was played get 0."""
    return against_baseline(rows)
