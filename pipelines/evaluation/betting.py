"""betting: values in [-1, 1], of any distribution -> bounds of their mean, which may be looked at after each value.

A bootstrap knows only values that were drawn. A candidate that gains a little on most tasks and fails on one of two hundred shows
a gain that is certain to a bootstrap as long as that one task is not drawn. Here every mean m is refuted by a bet against it: a
wealth that starts at 1 and is multiplied by 1 + stake (x - m) at each value x. Where the true mean is at most m, that is a
supermartingale which is never negative, whatever the stakes are, as long as they depend on earlier values only: the chance that it
ever reaches 1 / alpha is at most alpha (Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", arXiv 2010.09686).

How narrow the bounds are depends on the stakes. These aim at 1 / alpha after the planned number of values, anew at each of them:

    stake = sqrt(2 log(1 / (alpha wealth)) / (variance so far * values to come))

(Voráček and Orabona, "STaR-Bets", arXiv 2505.22422). `python -m tests.bench --only gate` compares them with the bootstrap.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 1e-3
"""Grid of the bounds, which are rounded outwards."""
LARGEST_LOSS = 0.98
"""The share of the wealth that one value may cost; after a loss of all of it nothing could be refuted."""
FIRST_VARIANCE = 0.25
"""The variance that the first stake assumes. It counts as one value afterwards."""


def mean_bounds(
    values: NDArray[np.float64], *, planned: float, confidence: float, weights: NDArray[np.float64] | None = None
) -> tuple[float, float]:
    """Returns a lower and an upper bound of the mean; each is wrong with a chance of at most (1 - confidence) / 2.

    Args:
        values: [n], each in [-1, 1], in an order that does not depend on them.
        planned: number of values after which the bets aim to be won. The bounds hold at any number of them.
        weights: [n], each in (0, 1], of which the mean is sum(weights * values) / sum(weights); None: all alike.
    """
    weights = np.ones(len(values)) if weights is None else weights
    target = math.log(2 / (1 - confidence))
    return (
        _lower_bound(values, weights, planned=planned, target=target),
        -_lower_bound(-values, weights, planned=planned, target=target),
    )


def _lower_bound(values: NDArray[np.float64], weights: NDArray[np.float64], *, planned: float, target: float) -> float:
    """Returns the largest mean of the grid that is refuted together with all smaller ones, where log wealth reached `target`.

    The smallest mean of the grid that is not below the true one is refuted with a chance of at most exp(-target), and the bound
    is wrong only if it is. Bisection would ask about means that the values choose, and have no such promise.
    """
    means = np.arange(-1 + RESOLUTION, 1, RESOLUTION)
    missing = np.full(len(means), target)  # log of the factor by which the wealth must still grow; 0: refuted for good
    squares = np.full(len(means), FIRST_VARIANCE)
    most = LARGEST_LOSS / (1 + means)
    for number, (value, weight) in enumerate(zip(values, weights, strict=True), 1):
        won = weight * (value - means)
        to_come = max(planned - number + 1, 1)
        stakes = np.minimum(np.sqrt(2 * missing / (squares / number * to_come)), most)
        missing = np.maximum(missing - np.log1p(stakes * won), 0)
        squares += won**2
    num_refuted = int(np.argmax(missing > 0)) if missing.any() else len(means)
    return float(means[num_refuted - 1]) if num_refuted else -1.0
