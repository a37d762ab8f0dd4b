"""reinforce_pp: return-to-go of each token, whitened over the iteration (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.gae import whiten
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def reinforce_pp(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Per row and token: sum over the row's later tokens of gamma^k r, then whitened (`advantage.whiten`)."""
    returns = []
    for rewards in rows.token_rewards:
        r = np.asarray(rewards, dtype=np.float64)
        out, last = np.empty_like(r), 0.0
        for t in range(len(r) - 1, -1, -1):
            last = r[t] + settings.gamma * last
            out[t] = last
        returns.append(out)
    return whitened(returns, rows, settings)


def whitened(
    advantages: list[NDArray[np.float64]], rows: RewardedRows, settings: AdvantageConfig
) -> list[NDArray[np.float64]]:
    """As `advantage.whiten` says: over all tokens (its default), each agent's, or not."""
    if settings.whiten == "none":
        return advantages
    return whiten(advantages, labels=rows.agents if settings.whiten == "agent" else None)
