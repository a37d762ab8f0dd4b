"""opo: rewards against the baseline of least variance, weighed by length (OPO, arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, members_of
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def opo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """[N]: R - sum(length R) / sum(length) over the group; a group of one gets 0, or its reward (`singleton: raw`)."""
    scores, lengths = rows.scores, np.asarray(rows.lengths, dtype=np.float64)
    out = np.zeros(len(scores))
    for members in members_of(group_keys(rows, settings, default="task")):
        group, weights = scores[members], lengths[members]
        if len(members) == 1:
            out[members] = group if settings.singleton == "raw" else 0.0
        elif group.min() < group.max():
            out[members] = group - (weights @ group) / weights.sum()
    return out
