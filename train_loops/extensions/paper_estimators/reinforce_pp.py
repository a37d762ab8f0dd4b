"""reinforce_pp: whitens, over the iteration, the return-to-go of each token or what is left of the group's mean (arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from train_loops.advantages.gae import whiten
from train_loops.advantages.grouping import group_keys, minus_mean
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig


def reinforce_pp(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays, one value per completion token: G_t = r_t + gamma G_{t+1}, then whitened (`advantage.whiten`)."""
    returns = []
    for rewards in rows.token_rewards:
        r = np.asarray(rewards, dtype=np.float64)
        row_returns, later = np.empty_like(r), 0.0
        for t in range(len(r) - 1, -1, -1):
            later = r[t] + settings.gamma * later
            row_returns[t] = later
        returns.append(row_returns)
    return _whitened(returns, rows, settings)


def reinforce_pp_baseline(rows: RewardedRows, settings: AdvantageConfig) -> list[NDArray[np.float64]]:
    """Returns N arrays: R_i - mean_g on every completion token of row i, then whitened (`advantage.whiten`).

    Turns are compared, not episodes: the paper has one completion per episode, and a turn keeps its own credit.
    """
    keys = group_keys(rows, settings, default="task")
    centred = minus_mean(rows.scores, keys, settings, batch_keys=rows.agents)
    return _whitened([np.full(n, a) for n, a in zip(rows.lengths, centred, strict=True)], rows, settings)


def _whitened(
    advantages: list[NDArray[np.float64]], rows: RewardedRows, settings: AdvantageConfig
) -> list[NDArray[np.float64]]:
    """Whitens as `advantage.whiten` says: over all tokens (the default here), over each agent's, or not at all."""
    if settings.whiten == "none":
        return advantages
    return whiten(advantages, labels=rows.agents if settings.whiten == "agent" else None)
