"""logprobs: a causal language model and a batch -> logprobs (and entropy) of the completion tokens, in float32.

The trunk runs once over prompt and completion; the head, whose logits are the largest tensor of a training step, runs
only where the next token is a completion token, in chunks whose logits are recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from train_loops.rows.batching import Batch, collate_turns
from train_loops.rows.packed_attention import install, refuse_unpackable, refuse_unshareable, telling
from train_loops.signal.losses import at_least_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 4096
"""Completion tokens whose logits exist at one time in training: 4096 x 150k words x 4 bytes = 2.5 GB."""
FORBIDDEN = -1e30
"""The logit of a token that could not be sampled: its probability is 0, and its part of the entropy, which -inf would make NaN."""
SCORING_CHUNK_TOKENS = 512
"""The same without gradients, where a further chunk costs nothing: the smaller the tensors, the faster on a CPU."""


class PolicyScorer(nn.Module):
    """Wraps a Hugging Face causal language model so that `forward` gives logprobs; a DeepSpeed engine wraps this.

    One call of one module per microbatch, always over all parameters (also for an empty microbatch), so that workers'
    collectives stay in step. Parameter names gain the prefix `model.`; export from `scorer.model`.
    """

    model: PreTrainedModel
    value_head: nn.Module | None
    """[N, H] -> [N, 1], of a critic that shares the policy's trunk."""

    def __init__(self, model: PreTrainedModel, *, num_known: int | None = None) -> None:
        """Wraps `model`. Args: num_known: rows of the head that stand for a token; None: all. Engines mask the others."""
        super().__init__()
        install(model)
        self.model = model
        self.value_head = None
        self.num_known = num_known

    def forward(
        self,
        batch: Batch,
        *,
        with_entropy: bool = False,
        with_values: bool = False,
        trains_trunk: bool = True,
        with_padded_rows: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logprobs, entropy (nats) and values of the completion tokens, each [N] float32.

        Args:
            with_entropy: False: the entropy is all zeros.
            with_values: True: the values of the states in which the tokens were sampled, from `value_head`; else zeros.
            trains_trunk: False: the values have a gradient in the head only.
            with_padded_rows: True: over all rows of the head, as an engine computes the logprobs of a prompt.

        Raises ValueError where a completion holds a token beyond the rows that stand for one.
        """
        hidden = hidden_states(self.model.get_decoder(), batch)
        num_tokens = len(batch.targets)
        is_empty = num_tokens == 0
        num_known = None if with_padded_rows else self.num_known
        if num_known is not None and num_tokens and int(batch.targets.max()) >= num_known:
            raise ValueError(
                f"a completion holds token id {int(batch.targets.max())}, but the tokenizer's ids end at {num_known - 1}: an engine that "
                "masks no padded rows sampled it; sample the episodes again"
            )
        mine, mask_of_token = hidden, batch.mask_of_token
        targets = batch.token_ids[0, :1] if is_empty else batch.targets
        temperature = batch.temperature.new_ones(1) if is_empty else batch.temperature
        if batch.shared is not None:  # the head takes much of the time: each worker scores a part of the tokens
            part_of = partial(batch.shared.part_of, dim=0)
            mine, targets = part_of(hidden), part_of(targets)
            # Tokens that fill up the last part count nowhere, but must be finite.
            temperature = part_of(temperature, padding=1)
            mask_of_token = None if mask_of_token is None else part_of(mask_of_token)
        scored = _score(
            self.model.get_output_embeddings(),
            mine,
            targets,
            temperature,
            mask_of_token,
            with_entropy=with_entropy,
            num_known=num_known,
            masks=batch.masks,
        )
        if batch.shared is not None:
            scored = batch.shared.gathered(scored, dim=1)
        scored = scored[:, :num_tokens]
        if not with_values:
            return scored[0], scored[1], torch.zeros_like(scored[0])
        if self.value_head is None:
            raise ValueError("this policy has no value head: values come from a critic of train.critic.kind: shared")
        features = hidden if trains_trunk else hidden.detach()
        return scored[0], scored[1], at_least_float32(self.value_head(features).squeeze(-1))[:num_tokens]


def completion_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the logprobs, [N] float32. `model` is a `PolicyScorer`, or a DeepSpeed engine around one."""
    return model(batch)[0]


def probe_logprobs(
    policy: Callable[..., Any], sequences: Sequence[Sequence[int]], *, on: torch.device | str = "cpu"
) -> tuple[tuple[float, ...], ...]:
    """Returns for each sequence the logprobs of all tokens but its first, as an engine answers a probe. Args: on: where `policy` is."""
    logprobs = []
    with torch.no_grad():
        for ids in sequences:
            batch = collate_turns([(ids[:1], ids[1:])]).to(on)
            logprobs.append(tuple(policy(batch, with_padded_rows=True)[0].tolist()))
    return tuple(logprobs)


def hidden_states(trunk: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Returns [N, H]: the hidden state from which each completion token is predicted.

    It is [1, H] for an empty microbatch: after the caller slices the result away ([:0]), backward still runs over every
    parameter, with gradients of zero, and the worker takes part in all collectives.
    """
    laid: dict[str, Any] = {}
    token_ids, shared, length = batch.token_ids, batch.shared, batch.token_ids.shape[1]
    if batch.families is not None:
        refuse_unpackable(trunk)
        laid = {"position_ids": batch.position_ids, "families": batch.families}
    if shared is not None:
        refuse_unshareable(trunk, shared)
        positions = torch.arange(length, device=token_ids.device)[None].expand_as(token_ids)
        laid["position_ids"] = shared.part_of(laid.get("position_ids", positions), dim=1)
        laid["shared"], token_ids = shared, shared.part_of(token_ids, dim=1)
    with telling(bool(laid)):
        hidden = trunk(input_ids=token_ids, use_cache=False, **laid).last_hidden_state
    if shared is not None:
        hidden = shared.gathered(hidden, dim=1)[:, :length]
    hidden = hidden.flatten(0, 1)
    return hidden[batch.predictors] if len(batch.predictors) else hidden[:1]


def _score(
    head: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    mask_of_token: torch.Tensor | None,
    *,
    with_entropy: bool,
    num_known: int | None,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """Maps hidden states [N, H], targets [N] and temperatures [N] to [2, N]: logprobs and entropy over `num_known` rows,
    or over those of them that each token's mask allows.

    The head's weight is used directly: under ZeRO-3 a call of the head module per chunk would be a collective per
    chunk, and workers have different numbers of chunks.
    """
    weight, bias = head.weight, getattr(head, "bias", None)

    def chunk(
        h: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, mask_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        # At temperature t the engine samples from softmax(logits / t): that distribution is the policy that is trained.
        known = F.linear(h, weight[:num_known], None if bias is None else bias[:num_known])
        logits = at_least_float32(known) / t[:, None]
        if masks is not None and mask_ids is not None:
            logits.masked_fill_(_forbidden(masks[mask_ids], logits.shape[-1]), FORBIDDEN)
        logprobs = _gather(logits, ids)
        return torch.stack([logprobs, _entropy(logits) if with_entropy else torch.zeros_like(logprobs)])

    size = CHUNK_TOKENS if torch.is_grad_enabled() else SCORING_CHUNK_TOKENS
    rows = [hidden, targets, temperature] + ([] if mask_of_token is None else [mask_of_token])
    parts = zip(*(x.split(size) for x in rows), strict=True)
    if len(hidden) <= size or not torch.is_grad_enabled():
        return torch.cat([chunk(*part) for part in parts], dim=1)
    # Without recomputation backward would keep the logits of all chunks, and cutting would save nothing.
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts], dim=1)


def _forbidden(masks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Unpacks masks, [N, ceil(V / 32)] int32, into [N, num_tokens] bool: True where a token could not be sampled."""
    eights = (~masks).view(torch.uint8)  # little-endian, as `samples.Masks` is
    bits = torch.arange(8, device=masks.device, dtype=torch.uint8)
    return ((eights[:, :, None] >> bits) & 1).flatten(1)[:, :num_tokens].bool()


def _gather(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
