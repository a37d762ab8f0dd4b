"""dr_mas: rewards compared per agent within groups of episodes of the same task (arXiv 2602.08847; seed-systems 2.3).

Agents that share weights have rewards of different scale and are called at different rates; normalised together, one
agent's gradient drowns the other's. Every invocation counts: an agent called three times in an episode brings three
entries to its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from train_loops.advantages.grpo import normalize_groups


def dr_mas(
    scores: ArrayLike,
    *,
    group_ids: Sequence[str],
    agents: Sequence[str],
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
) -> NDArray[np.float64]:
    """One advantage per row, [N]: (R - mean) / (std + eps) over the rows of the same (group, agent).

    Args:
        scores: [N], a row's reward (minus beta times its summed KL where KL is in the reward).
        group_ids: [N], episodes of one task in one iteration.
        agents: [N].
        normalize_std: False leaves the division out.
        ddof: 1 as in the reference code, 0 as in the paper.
        eps: see above.
        singleton: an agent called once in a group gets 0, or its raw reward (what the reference does).
    """
    keys = list(zip(group_ids, agents, strict=True))
    return normalize_groups(scores, keys, normalize_std=normalize_std, ddof=ddof, eps=eps, singleton=singleton)
