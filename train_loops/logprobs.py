"""logprobs: a causal language model and a batch -> logprobs (and entropy) of the completion tokens, in float32.

The trunk runs once over prompt and completion; the head, whose logits are the largest tensor of a training step, runs
only where the next token is a completion token, in chunks whose logits are recomputed in backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from train_loops.batching import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 4096
"""Completion tokens whose logits exist at one time in training: 4096 x 150k words x 4 bytes = 2.5 GB."""
SCORING_CHUNK_TOKENS = 512
"""The same without gradients, where a further chunk costs nothing: the smaller the tensors, the faster on a CPU."""


class PolicyScorer(nn.Module):
    """Wraps a Hugging Face causal language model so that `forward` gives logprobs: what a DeepSpeed engine is given.

    One call of one module per microbatch, always over all parameters (also for an empty microbatch), so that workers'
    collectives stay in step. Parameter names gain the prefix `model.`; export from `scorer.model`.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"{type(model).__name__} has {name}={getattr(config, name)}: its logits are not head(hidden), "
                    "which PolicyScorer computes; use another base model"
                )
        self.model = model

    def forward(
        self, token_ids: torch.Tensor, loss_mask: torch.Tensor, temperature: torch.Tensor, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropy, both [B, T-1] float32 and 0 outside `loss_mask`.

        Args:
            token_ids: [B, T], padded on the right. No attention mask is needed: attention is causal.
            loss_mask: [B, T-1] bool, which targets to score.
            temperature: [B], of the sampling distribution.
            with_entropy: else the entropy is all zeros.
        """
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
        picked = loss_mask
        if not loss_mask.any():  # score one position, times zero: every parameter still takes part in backward
            picked = torch.zeros_like(loss_mask)
            picked[0, 0] = True
        rows = picked.nonzero()[:, 0]
        values = _score(
            self.model.get_output_embeddings(),
            hidden[picked],
            token_ids[:, 1:][picked],
            temperature.float()[rows],
            with_entropy=with_entropy,
        )
        out = hidden.new_zeros((2, *loss_mask.shape), dtype=torch.float32)
        out = out.masked_scatter(picked.expand_as(out), values) * loss_mask
        return out[0], out[1]


def completion_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[B, T-1] float32, 0 outside the loss mask. `model`: a `PolicyScorer`, or a DeepSpeed engine around one."""
    return model(batch.token_ids, batch.loss_mask, batch.temperature)[0]


def completion_logprobs_and_entropy(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """As `completion_logprobs`, with the entropy of the sampling distribution at each scored position (nats)."""
    return model(batch.token_ids, batch.loss_mask, batch.temperature, with_entropy=True)


def _score(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, *, with_entropy: bool
) -> torch.Tensor:
    """[N, H], [N], [N] -> [2, N]: logprobs and entropy.

    The head's weight is used directly: under ZeRO-3 a call of the head module per chunk would be a collective per
    chunk, and workers have different numbers of chunks.
    """
    weight, bias = head.weight, getattr(head, "bias", None)

    def chunk(h: torch.Tensor, ids: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = F.linear(h, weight, bias).float() / t[:, None]
        logprobs = _gather(logits, ids)
        return torch.stack([logprobs, _entropy(logits) if with_entropy else torch.zeros_like(logprobs)])

    size = CHUNK_TOKENS if torch.is_grad_enabled() else SCORING_CHUNK_TOKENS
    parts = zip(*(x.split(size) for x in (hidden, targets, temperature)), strict=True)
    if len(hidden) <= size or not torch.is_grad_enabled():
        return torch.cat([chunk(*part) for part in parts], dim=1)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts], dim=1)


def _gather(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
