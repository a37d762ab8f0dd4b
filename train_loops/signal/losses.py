"""losses: pure losses per token, and their aggregation with denominators of the whole minibatch.

Shapes are flat, [N]: N is the number of completion tokens of a microbatch, row by row, and `row_of_token` [N] says which
row each token belongs to. `aggregate` sums a loss per token up. Its denominators belong to the whole minibatch, so how rows
were cut into microbatches or dealt to workers never changes a row's gradient. The figures of a loss are per token, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from train_loops.config import LossConfig

About = dict[str, torch.Tensor]
"""Figures per token, [N] each, detached."""
Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """The numbers by which a minibatch's sums are divided, over all its microbatches and workers."""

    num_tokens: int
    """Trainable tokens."""
    num_rows: int
    """Rows with at least one trainable token."""
    norm_tokens: int | None
    """A constant number of tokens (`loss.norm_tokens`), for `seq_mean_token_sum_norm` alone."""

    @classmethod
    def of(cls, completion_lengths: Sequence[int], *, norm_tokens: int | None = None) -> Denominators:
        """Counts over the completion lengths of all rows of the minibatch, on all workers; each count is at least 1."""
        return cls(
            num_tokens=max(sum(completion_lengths), 1),
            num_rows=max(sum(n > 0 for n in completion_lengths), 1),
            norm_tokens=norm_tokens,
        )


def aggregate(
    loss: torch.Tensor, row_of_token: torch.Tensor, *, mode: Aggregation, denominators: Denominators
) -> torch.Tensor:
    """Returns one microbatch's share of the minibatch loss, a scalar: the shares of all microbatches add up to the loss.

    A data-parallel engine that averages gradients over W workers needs the share times W.

        token_mean               sum_it L_it / num_tokens                       (DAPO, arXiv 2503.14476)
        seq_mean_token_sum       sum_i (sum_t L_it) / num_rows
        seq_mean_token_mean      sum_i (sum_t L_it / tokens_i) / num_rows       (GRPO, arXiv 2402.03300)
        seq_mean_token_sum_norm  sum_i (sum_t L_it) / (num_rows norm_tokens)    (Dr. GRPO, arXiv 2503.20783)

    The last one divides by a constant, so that no completion's length changes what its tokens weigh.

    Args:
        loss: [N], per token.
        row_of_token: [N], needed by `seq_mean_token_mean` only.

    Raises:
        ValueError: `mode` is not known, or it is `seq_mean_token_sum_norm` and the denominators have no `norm_tokens`.
    """
    loss = at_least_float32(loss)
    if mode == "token_mean":
        return loss.sum() / denominators.num_tokens
    if mode == "seq_mean_token_sum":
        return loss.sum() / denominators.num_rows
    if mode == "seq_mean_token_mean":
        return (loss / _tokens_of_row(row_of_token)).sum() / denominators.num_rows
    if mode == "seq_mean_token_sum_norm":
        if denominators.norm_tokens is None:
            raise ValueError(
                "train.loss.aggregation is 'seq_mean_token_sum_norm' and train.loss.norm_tokens is null: give the largest "
                "max_tokens of the agents (stage train does it by itself)"
            )
        return loss.sum() / (denominators.num_rows * denominators.norm_tokens)
    raise ValueError(f"train.loss.aggregation is {mode!r}; known: {Aggregation.__args__}")  # type: ignore[attr-defined]


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row_of_token: torch.Tensor,
    *,
    loss: LossConfig,
    importance_weights: torch.Tensor | None = None,
    keep_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, About]:
    """Computes the loss per token that `loss.policy` names, weighted and masked.

    Args:
        logprobs, old_logprobs, advantages: [N].
        row_of_token: [N], used by gspo only.
        importance_weights: [N], constants that multiply the loss (see `mismatch`).
        keep_mask: [N] bool; where it is False the loss is 0. Denominators count such tokens all the same, so that a
            rejected token does not make the others weigh more.

    Returns:
        Loss per token [N], and [N] each, masked tokens included: `ratio`, `approx_kl`, `clip_share` and, for ppo_clip,
        `dual_clip_share`.

    Raises:
        ValueError: `loss.policy` is not known.
    """
    clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.policy == "ppo_clip":
        per_token, about = ppo_clip(logprobs, old_logprobs, advantages, dual_clip=loss.dual_clip, **clips)
    elif loss.policy == "gspo":
        per_token, about = gspo(logprobs, old_logprobs, advantages, row_of_token, **clips)
    elif loss.policy == "cispo":
        per_token, about = cispo(logprobs, old_logprobs, advantages, **clips)
    elif loss.policy == "reinforce":
        per_token, about = reinforce(logprobs, old_logprobs, advantages)
    else:
        raise ValueError(f"train.loss.policy is {loss.policy!r}; known: ppo_clip, gspo, cispo, reinforce")
    if importance_weights is not None:
        per_token = per_token * importance_weights
    if keep_mask is not None:
        per_token = torch.where(keep_mask, per_token, 0.0)
    return per_token, about


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[torch.Tensor, About]:
    """Computes PPO's clipped surrogate (arXiv 1707.06347), asymmetric as in DAPO (2503.14476), with dual clip (1912.09729).

        d = clamp(logprobs - old_logprobs, +-20), r = e^d
        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  A < 0: L = min(L, -A dual_clip)

    Args:
        logprobs, old_logprobs, advantages: [N].

    Returns:
        Loss per token [N], and [N] each `ratio`, `approx_kl` (-d), `clip_share` (1 where the clip decides) and
        `dual_clip_share` (1 where dual clip decides).
    """
    d = _log_ratio(logprobs, old_logprobs)
    ratio = d.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_dual = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, _about(ratio, d, clipped > plain) | {"dual_clip_share": is_dual.detach().float()}


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row_of_token: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, About]:
    """Computes GSPO's loss (arXiv 2507.18071): every token has the length-normalised ratio of its whole completion.

        d_t = logprobs - old_logprobs, s_i = exp(mean_t d_t);  per token  sg[s_i] pi / sg[pi], its log clamped to at most 10
        L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), always aggregated by seq_mean_token_mean

    sg stops gradients. The paper clips at 3e-4 and 4e-4. All tensors are [N], and every row of the microbatch must be
    there whole.
    """
    d = at_least_float32(logprobs) - old_logprobs  # no clamp per token: the ratio is that of the whole sequence
    num_rows = int(row_of_token.max()) + 1 if len(row_of_token) else 0
    mean = d.new_zeros(num_rows).index_add(0, row_of_token, d / _tokens_of_row(row_of_token))[row_of_token]
    # Its value is exactly 0 and its gradient that of `logprobs`: the ratio keeps the mean's last digits, and each token has
    # the gradient of its own logprob.
    straight_through = logprobs - logprobs.detach()
    ratio = (mean.detach() + straight_through).clamp(max=10).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), _about(ratio, d, clipped > plain)


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, About]:
    """Computes CISPO's loss (MiniMax-M1, arXiv 2506.13585), all tensors [N]; sg stops gradients.

    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs
    """
    d = _log_ratio(logprobs, old_logprobs).detach()
    ratio = d.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * advantages * at_least_float32(logprobs), _about(ratio, d, clipped != ratio)


def reinforce(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, About]:
    """Computes L = -A logprobs (REINFORCE, Williams 1992), [N]; it is right for one step per iteration.

    The ratio is only reported.
    """
    d = _log_ratio(logprobs, old_logprobs).detach()
    return -advantages * at_least_float32(logprobs), _about(d.exp(), d, torch.zeros_like(d))


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    value_clip: float,
    huber_delta: float | None = None,
) -> tuple[torch.Tensor, About]:
    """Computes PPO's clipped value loss per token, [N]; with `huber_delta` as MAPPO has it (arXiv 2103.01955).

        L = max(l(v - G), l(clip(v, v_old +- value_clip) - G)),   l(x) = 1/2 x^2
        Huber: l(x) = 1/2 x^2 where |x| <= delta, else delta (|x| - delta / 2)

    Args:
        values, old_values, returns: [N].

    Returns:
        Loss per token [N], and [N] `value_clip_share` (1 where the clip decides).
    """
    values = at_least_float32(values)
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain, clipped = (_error(v - returns, huber_delta) for v in (values, near))
    return torch.maximum(plain, clipped), {"value_clip_share": (clipped > plain).detach().float()}


def _error(x: torch.Tensor, delta: float | None) -> torch.Tensor:
    square = 0.5 * x.square()
    return square if delta is None else torch.where(x.abs() <= delta, square, delta * (x.abs() - 0.5 * delta))


def _log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    return (at_least_float32(logprobs) - old_logprobs).clamp(-20, 20)


def _about(ratio: torch.Tensor, d: torch.Tensor, is_clipped: torch.Tensor) -> About:
    return {"ratio": ratio.detach(), "approx_kl": -d.detach(), "clip_share": is_clipped.detach().float()}


def _tokens_of_row(row_of_token: torch.Tensor) -> torch.Tensor:
    """Returns [N]: how many tokens the row of each token has."""
    return torch.bincount(row_of_token)[row_of_token] if len(row_of_token) else row_of_token


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Converts bfloat16 and float16 to float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
