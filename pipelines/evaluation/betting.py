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

CELL = 0.01
"""Means are tested in cells of this width. All means of a cell face the stakes against its upper end."""
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
        weights: [n], each in (0, 1], of which the mean is sum(weights * values) / sum(weights); None: all alike. What they are a share
            of must be known before the values are.
    """
    weights = np.ones(len(values)) if weights is None else weights
    target = math.log(2 / (1 - confidence))
    sides = np.stack([values, -values])
    ends: NDArray[np.float64] = np.arange(-1 + CELL / 2, 1, CELL, dtype=np.float64)
    stakes, is_refuted = _stakes(sides, weights, ends, planned=planned, target=target)
    low, minus_high = (
        _lower_bound(weights * side, weights, ends, stakes[:, number], is_refuted[number], target)
        for number, side in enumerate(sides)
    )
    # Values whose order is not one by chance, all wins first, refute every mean: then no bound is to be trusted, and both give way.
    return min(low, -minus_high), max(low, -minus_high)


def _stakes(
    sides: NDArray[np.float64],
    weights: NDArray[np.float64],
    ends: NDArray[np.float64],
    *,
    planned: float,
    target: float,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns the stakes [n, sides, ends] against the upper end of each cell, and whether the log wealth reached `target`.

    Args: sides: [sides, n], the values and their mirror image.
    """
    missing = np.full((len(sides), len(ends)), target)  # what the log wealth lacks; 0: refuted, for good
    squares = np.full_like(missing, FIRST_VARIANCE)
    stakes = np.empty((sides.shape[1], *missing.shape))
    largest = LARGEST_LOSS / (1 + ends)
    for number, weight in enumerate(weights):
        won = weight * (sides[:, number, None] - ends)
        to_come = max(planned - number, 1)
        stakes[number] = np.minimum(np.sqrt(2 * missing / (squares / (number + 1) * to_come)), largest)
        missing = np.maximum(missing - np.log1p(stakes[number] * won), 0)
        squares += won**2
    return stakes, missing == 0


def _lower_bound(
    weighted: NDArray[np.float64],
    weights: NDArray[np.float64],
    ends: NDArray[np.float64],
    stakes: NDArray[np.float64],
    is_refuted: NDArray[np.bool_],
    target: float,
) -> float:
    """Returns the largest mean that is refuted together with all smaller ones.

    The wealth falls with the mean that the same stakes are against. So a refuted end refutes its whole cell, and in the first cell
    whose end is not refuted the refuted means are the lower ones. The bound is wrong only if the true mean itself is refuted.
    """
    if is_refuted.all():
        return float(ends[-1])
    cell = int(np.argmin(is_refuted))
    low, high = float(ends[cell - 1]) if cell else -1.0, float(ends[cell])
    while high - low > 1e-6:
        middle = (low + high) / 2
        wealth = np.cumsum(np.log1p(stakes[:, cell] * (weighted - weights * middle)))
        low, high = (middle, high) if wealth.max() >= target else (low, middle)
    return low
