"""opo: subtracts the baseline of least variance, a mean weighted by length (OPO, arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import group_keys, members_of
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def opo(rows: RewardedRows, settings: AdvantageConfig) -> NDArray[np.float64]:
    """Returns [N]: A_i = R_i - sum_g(length R) / sum_g(length); a group of one is treated as `settings.singleton` says.

    Turns are compared, not episodes: the weights stand for the size of gradients, and each turn has its own length and
    credit.
    """
    scores, lengths = rows.scores, np.asarray(rows.lengths, dtype=np.float64)
    out = np.zeros(len(scores))
    for members in members_of(group_keys(rows, settings, default="task")):
        if len(members) > 1:
            among = members
        elif settings.singleton == "batch":
            among = [i for i, agent in enumerate(rows.agents) if agent == rows.agents[members[0]]]
        else:
            out[members] = scores[members] if settings.singleton == "raw" else 0.0
            continue
        group, weights = scores[among], lengths[among]
        if group.min() != group.max():  # NaN is not equal and stays NaN
            out[members] = scores[members] - (weights @ group) / weights.sum()
    return out
