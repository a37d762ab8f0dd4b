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


def update_order(
    model_groups: Collection[str], *, seed: int, iteration: int, order: Literal["random", "fixed"]
) -> list[str]:
    """In which order groups are updated: as they are given, or a permutation drawn anew for each iteration."""
    groups = list(model_groups)
    if order == "random":
        random.Random(f"happo/{seed}/{iteration}").shuffle(groups)
    return groups


def log_factor(log_ratios: Sequence[Mapping[str, float]], *, limit: float) -> dict[str, float]:
    """Log M of each episode, clipped to +-`limit`; an episode in which no updated group acted is not there (M = 1).

    Args:
        log_ratios: of each group updated before: per episode the sum over its turns and tokens of
            logprob after - logprob before.
    """
    total: dict[str, float] = {}
    for of_group in log_ratios:
        for episode, x in of_group.items():
            total[episode] = total.get(episode, 0.0) + x
    return {episode: min(max(x, -limit), limit) for episode, x in total.items()}


def effective_sample_size(log_factors: Sequence[float]) -> float:
    """(sum M)^2 / (n sum M^2): 1 where all M are equal, 1/n where one outweighs all others; 1 without any."""
    factors = [math.exp(x) for x in log_factors]
    return sum(factors) ** 2 / (len(factors) * sum(f * f for f in factors)) if factors else 1.0
