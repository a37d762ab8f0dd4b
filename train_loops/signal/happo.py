"""happo: updates model groups one after another, each weighted by what the updates before it changed (arXiv 2109.11251).

    M(episode) = prod over the groups updated before of prod over their turns' tokens exp(logprob after - logprob before)

Advantages are multiplied by M. The paper has one action per step; here an action is a whole completion, and a product
over all its tokens explodes, so log M is clipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

MAX_LOG_FACTOR = math.log(2)


def update_order(
    model_groups: Collection[str], *, seed: int, iteration: int, order: Literal["random", "fixed"]
) -> list[str]:
    """Returns the order in which groups are updated: as given (`fixed`), or drawn anew for each iteration (`random`)."""
    groups = list(model_groups)
    if order == "random":
        random.Random(f"happo/{seed}/{iteration}").shuffle(groups)
    return groups


def log_factor(log_ratios: Sequence[Mapping[str, float]], *, limit: float = MAX_LOG_FACTOR) -> dict[str, float]:
    """Returns log M of each episode, clipped to +-`limit`; episodes in which no updated group acted are left out (M = 1).

    Args:
        log_ratios: for each group updated before, per episode the sum over its turns and tokens of
            logprob after - logprob before.
    """
    total: dict[str, float] = {}
    for ratio_of in log_ratios:
        for episode, log_ratio in ratio_of.items():
            total[episode] = total.get(episode, 0.0) + log_ratio
    return {episode: min(max(x, -limit), limit) for episode, x in total.items()}
