"""against_baseline: rewards minus what a variant of the episode earned: remax, counterfactual and leave_one_out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.rewarded_rows import RewardedRows


def against_baseline(rows: RewardedRows) -> list[NDArray[np.float64]]:
    """Per row and token: the sum of r from the token to the row's end, minus the row's baseline.

    A row without a baseline has nothing to be compared with: 0 on all its tokens.
    """
    out = []
    for rewards, baseline in zip(rows.token_rewards, rows.baselines, strict=True):
        r = np.asarray(rewards, dtype=np.float64)
        out.append(np.zeros_like(r) if baseline is None else np.cumsum(r[::-1])[::-1] - baseline)
    return out
