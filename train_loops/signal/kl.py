"""kl: estimates KL(policy || reference) from sampled tokens, and puts a KL term into rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

KLEstimator = Literal["k1", "abs", "k2", "k3"]
LEAST_FACTOR = 0.1
"""The coefficient keeps at least this share of itself in one iteration."""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Returns an estimate per token, in the shape of the inputs (Schulman 2020, http://joschu.net/blog/kl-approx.html).

        d = logprobs - ref_logprobs
        k1 = d    abs = |d|    k2 = d^2/2    k3 = clamp(e^x - x - 1, +-10), x = clamp(-d, +-20)

    The clamps are those of verl 0.8. With s the score function, E[k1 s] is the gradient of KL(policy || ref), so that k1
    belongs into the reward, where k2, k3 and abs have another one. In a loss, on policy, the gradient of k2 is that of
    KL(policy || ref), that of k3 is that of KL(ref || policy), and that of k1 has mean zero.
    """
    d = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        x = (-d).clamp(-20, 20)
        return (x.exp() - x - 1).clamp(-10, 10)
    raise ValueError(f"the KL estimator is {estimator!r}; known: k1, abs, k2, k3")


def k3(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns k3 for figures, e^x - x - 1 per token, x = logprob of the other - of the one that sampled; e^x is at most e^20."""
    return np.exp(np.minimum(x, 20)) - x - 1


def token_rewards(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    kl: Sequence[NDArray[np.floating]] | None = None,
    beta: float = 0.0,
) -> list[NDArray[np.float64]]:
    """Turns rewards per turn into rewards per completion token: r_t = score_t - beta kl_t (arXiv 1909.08593).

    The score stands on the last token only.

    Args:
        rewards: [N], one per row.
        lengths: [N], completion tokens of each row, at least 1.
        kl: N rows, one estimate per completion token (None: no KL term).
        beta: the KL coefficient in the reward.
    """
    rows = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        r = np.zeros(length) if kl is None else -beta * np.asarray(kl[i], dtype=np.float64)
        assert r.shape == (length,), f"row {i}: {length} completion tokens but kl of shape {r.shape}"
        r[-1] += reward  # the turn's reward is known when its last token is sampled
        rows.append(r)
    return rows


def adapted_coef(coef: float, *, kl: float, num_episodes: int, target: float, horizon: int) -> float:
    """Returns the next KL coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

        coef max(1 + clip(kl / target - 1, +-0.2) num_episodes / horizon, 0.1)

    The paper has 0.1 for num_episodes / horizon, so that its factor lies within 1 +- 0.02 and is never near 0. Here it would be
    negative from 5 horizons of episodes per iteration on, and the KL would be off for good: the factor is 0.1 at least.

    Args:
        kl: measured KL to the reference, nats per token.
        num_episodes: of the iteration.
        target, horizon: see `AdaptiveKLConfig`.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * max(1 + error * num_episodes / horizon, LEAST_FACTOR)
