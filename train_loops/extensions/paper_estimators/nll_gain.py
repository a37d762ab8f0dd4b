"""nll_gain: logprobs of completions -> UMAD's factor on advantages, which favours what the policy finds likely.

Source: UMAD, arXiv 2603.01221. The standard deviation has ddof 0, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[NDArray[np.floating]]
NOISE = 0.01
"""Nats: the same completion has another U by up to this, as its row lies beside other rows (.002 measured in bfloat16)."""


def nll_gain(logprobs: Rows, *, keys: Sequence[Hashable], alpha: float) -> NDArray[np.float64]:
    """Returns [N]: exp(-alpha (U - mean_g) / (std_g + 1e-8)) among rows of equal key.

    U is the mean negative log-likelihood of a completion's tokens.

    Args:
        logprobs: N rows over completion tokens: the old ones, under the parent weights. These sampled them, unless the episodes are
            another version's.
        keys: [N]; rows of equal key are compared: same group, agent and round.
        alpha: `advantage.nll_gain`.
    """
    return gains_of([-float(np.mean(x)) for x in logprobs], keys=keys, alpha=alpha)


def gains_of(nll: Sequence[float], *, keys: Sequence[Hashable], alpha: float) -> NDArray[np.float64]:
    """Returns the same from U itself, [N]; rows that are alone in their group, or alike up to `NOISE`, have a gain of exactly 1."""
    u = np.asarray(nll, dtype=np.float64)
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    gains = np.ones(len(u))
    for rows in members.values():
        group = u[rows]
        if not np.ptp(group) <= NOISE:  # NaN is not equal and stays NaN
            gains[rows] = np.exp(-alpha * (group - group.mean()) / (group.std() + 1e-8))
    return gains
