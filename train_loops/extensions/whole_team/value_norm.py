"""value_norm: a running mean and standard deviation of returns, in which a critic learns (MAPPO, arXiv 2103.01955)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNorm:
    """Exponentially weighted moments of returns, debiased as in MAPPO's code; all 0: no returns were seen yet.

    m <- beta m + (1 - beta) mean(x),   s <- beta s + (1 - beta) mean(x^2),   w <- beta w + (1 - beta)
    mean = m / w,   std = sqrt(max(s / w - mean^2, 0.01))
    """

    mean: float = 0.0
    mean_square: float = 0.0
    weight: float = 0.0
    """Sum of the weights of all batches so far, by which the moments are divided (debiasing, as in Adam)."""

    def updated(self, returns: ArrayLike, *, beta: float = 0.99999) -> ValueNorm:
        """Returns the moments after one more batch of returns; with `beta` so near 1 they are means over batches."""
        x = np.asarray(returns, dtype=np.float64)
        keep, take = beta, 1 - beta
        return ValueNorm(
            mean=keep * self.mean + take * float(x.mean()),
            mean_square=keep * self.mean_square + take * float(np.square(x).mean()),
            weight=keep * self.weight + take,
        )

    def normalized(self, x: ArrayLike) -> NDArray[np.float64]:
        """Returns (x - mean) / std, in the shape of x."""
        mean, std = self._moments()
        return (np.asarray(x, dtype=np.float64) - mean) / std

    def denormalized(self, x: ArrayLike) -> NDArray[np.float64]:
        """Returns x std + mean, the inverse of `normalized`."""
        mean, std = self._moments()
        return np.asarray(x, dtype=np.float64) * std + mean

    def _moments(self) -> tuple[float, float]:
        if self.weight == 0:
            return 0.0, 1.0
        mean = self.mean / self.weight
        # The floor keeps values finite while all returns are equal, as at the beginning of a run with sparse rewards.
        return mean, max(self.mean_square / self.weight - mean**2, 1e-2) ** 0.5
