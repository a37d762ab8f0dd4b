"""reinforce_pp_baseline: subtracts the group's mean, then whitens over the iteration (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, minus_mean
from train_loops.advantages.reinforce_pp import whitened
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def reinforce_pp_baseline(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: R_i - mean_g on every completion token of row i, then whitened (`advantage.whiten`).

    Turns are compared, not episodes: the paper has one completion per episode, and a turn keeps its own credit.
    """
    centred = minus_mean(rows.scores, group_keys(rows, settings, default="task"), settings)
    return whitened([np.full(n, a) for n, a in zip(rows.lengths, centred, strict=True)], rows, settings)
