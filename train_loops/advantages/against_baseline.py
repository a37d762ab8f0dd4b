"""against_baseline: subtracts what a variant of the episode earned; shared by remax, counterfactual and leave_one_out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.rewarded_rows import RewardedRows


def against_baseline(rows: RewardedRows) -> list[NDArray[np.float64]]:
    """Returns N arrays, one value per completion token: A_t = sum_{k >= t} r_k - b, b the row's baseline.

    A row without a baseline cannot be compared with anything: all its tokens get 0.
    """
    out = []
    for rewards, baseline in zip(rows.token_rewards, rows.baselines, strict=True):
        r = np.asarray(rewards, dtype=np.float64)
        out.append(np.zeros_like(r) if baseline is None else np.cumsum(r[::-1])[::-1] - baseline)
    return out
