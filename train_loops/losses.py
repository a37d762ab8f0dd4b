"""losses: pure per-token losses, and their aggregation with global denominators (formulas of seed-systems 2.1).

Shapes: [B, T-1] everywhere, position t about token t+1; `mask` is bool. A loss per token is summed up by `aggregate`,
whose denominators belong to the whole minibatch: how rows were cut into microbatches, or dealt to workers, never
changes a row's gradient. Metrics are sums over masked tokens, so they add up the same way; divide by `num_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What a minibatch's sums are divided by, over all its microbatches and workers."""

    num_tokens: int
    """Trainable tokens."""
    num_rows: int
    """Rows with at least one trainable token."""
    max_tokens: int
    """Trainable tokens of the longest row."""

    @classmethod
    def of(cls, completion_lengths: Sequence[int]) -> Denominators:
        """From the completion lengths of all rows of the minibatch, on all workers; each at least 1."""
        return cls(
            num_tokens=max(sum(completion_lengths), 1),
            num_rows=max(sum(n > 0 for n in completion_lengths), 1),
            max_tokens=max(completion_lengths, default=1) or 1,
        )


def aggregate(loss: torch.Tensor, mask: torch.Tensor, *, mode: Aggregation, denominators: Denominators) -> torch.Tensor:
    """One microbatch's share of the minibatch loss, a scalar: the shares of all microbatches add up to the loss.

    A data-parallel engine that averages gradients over W workers needs the share times W.

        token_mean               sum_it L / num_tokens
        seq_mean_token_sum       sum_i (sum_t L_it) / num_rows
        seq_mean_token_mean      sum_i (sum_t L_it / tokens_i) / num_rows
        seq_mean_token_sum_norm  sum_it L / max_tokens
    """
    per_row = torch.where(mask, loss.float(), 0.0).sum(-1)
    if mode == "token_mean":
        return per_row.sum() / denominators.num_tokens
    if mode == "seq_mean_token_sum":
        return per_row.sum() / denominators.num_rows
    if mode == "seq_mean_token_mean":
        return (per_row / mask.sum(-1).clamp(min=1)).sum() / denominators.num_rows
    if mode == "seq_mean_token_sum_norm":
        return per_row.sum() / denominators.max_tokens
    raise ValueError(f"train.loss.aggregation is {mode!r}; known: {Aggregation.__args__}")  # type: ignore[attr-defined]


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    importance_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate (Schulman 2017), asymmetric (DAPO), with dual clip (Ye 2020) for negative advantages.

        d = clamp(logprobs - old_logprobs, +-20), r = e^d
        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  A < 0: L = min(L, -A dual_clip)

    Args:
        importance_weights: truncated exp(old - rollout) per token (see `mismatch`), constants; they multiply L.

    Returns:
        Loss per token, and sums over masked tokens: `ratio`, `approx_kl` (-d), `clip_share` (clip decides),
        `dual_clip_share` (dual clip decides).
    """
    d = (logprobs.float() - old_logprobs).clamp(-20, 20)
    ratio = d.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_dual = torch.zeros_like(mask)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_dual = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    if importance_weights is not None:
        loss = loss * importance_weights
    with torch.no_grad():
        metrics = {
            "ratio": _masked_sum(ratio, mask),
            "approx_kl": _masked_sum(-d, mask),
            "clip_share": _masked_sum((clipped > plain).float(), mask),
            "dual_clip_share": _masked_sum(is_dual.float(), mask),
        }
    return loss, metrics


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, value_clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """1/2 max((v - G)^2, (clip(v, v_old +- value_clip) - G)^2) per token.

    Returns:
        Loss per token, and sums over masked tokens: `value_clip_share`, `values`, `returns`.
    """
    values = values.float()
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    with torch.no_grad():
        metrics = {
            "value_clip_share": _masked_sum((clipped > plain).float(), mask),
            "values": _masked_sum(values, mask),
            "returns": _masked_sum(returns, mask),
        }
    return 0.5 * torch.maximum(plain, clipped), metrics


def _masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, x, 0.0).sum()
