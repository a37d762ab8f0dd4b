"""nll_gain: logprobs of completions -> UMAD's factor on advantages, which favours what the policy finds likely.

Source: seed-systems 2.4 (arXiv 2603.01221). Standard deviation with ddof 0, as in the reference.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[NDArray[np.floating]]


def nll_gain(logprobs: Rows, *, keys: Sequence[Hashable], alpha: float) -> NDArray[np.float64]:
    """[N]: exp(-alpha (U - mean) / (std + eps)) among rows of equal key, U = mean NLL of a completion's tokens.

    Args:
        logprobs: per row, over completion tokens, under the weights that sampled them.
        keys: [N], which rows are compared: the group, the agent, the round.
        alpha: `advantage.nll_gain`.
    """
    return gains_of([-float(np.mean(x)) for x in logprobs], keys=keys, alpha=alpha)


def gains_of(nll: Sequence[float], *, keys: Sequence[Hashable], alpha: float) -> NDArray[np.float64]:
    """The same from U itself, [N]; rows that are alone, or all alike, have a gain of exactly 1."""
    u = np.asarray(nll, dtype=np.float64)
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    gains = np.ones(len(u))
    for rows in members.values():
        group = u[rows]
        if group.min() != group.max():  # NaN is not equal and stays NaN
            gains[rows] = np.exp(-alpha * (group - group.mean()) / (group.std() + 1e-8))
    return gains
