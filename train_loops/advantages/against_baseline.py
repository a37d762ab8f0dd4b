"""against_baseline: compares a turn with what variants of the episode earned there: remax, counterfactual and leave_one_out.

    remax           the same agent's turn of the same round in the task's greedy episode (ReMax, arXiv 2310.10505)
    counterfactual  replays in which this turn alone was sampled anew: the baseline of COMA (arXiv 1705.08926) without a critic
    leave_one_out   replays without the agent's contribution: difference rewards (Wolpert and Tumer 1999, arXiv cs/9908014)

Which variant a turn is held against is said by `train_loops.signal.baselines`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.grouping import ROUNDING
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def against_baseline(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays, one value per completion token: A_t = sum_{k >= t} r_k - b, b the row's baseline.

    A row without a baseline cannot be compared with anything: all its tokens get 0. So do tokens whose return is the baseline up to
    rounding, as it is where all siblings earned the same: (.1 + .1 + .1) / 3 is not .1.
    """
    out = []
    for rewards, baseline in zip(rows.token_rewards, rows.baselines, strict=True):
        returns = np.cumsum(np.asarray(rewards, dtype=np.float64)[::-1])[::-1]
        held_against = returns if baseline is None else baseline
        is_equal = np.isclose(returns, held_against, rtol=ROUNDING, atol=ROUNDING)
        out.append(np.where(is_equal, 0.0, returns - held_against))
    return out
