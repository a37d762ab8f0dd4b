"""packed_attention: segments of rows laid end to end -> attention of each row to itself only, without a T x T mask.

Linear layers and norms see one [1, T] row without padding. Only attention takes it apart again: segments of about the
same length, after equally long beginnings, are one call. Installed as an attention function of transformers, so it
works in every model whose attention goes through that interface, with gradient checkpointing and under DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from train_loops.rows.shared_sequences import SharedSequences
from train_loops.rows.sharing import Segment

PACKED_ATTENTION = "troupe_packed"
"""Name of the attention function in transformers."""
LENGTH_STEP = 16
"""Segments attend in one call, padded to one length, if their lengths are equal when rounded up to a multiple of this."""
_is_told: ContextVar[bool] = ContextVar("is_told", default=False)
"""Whether the attention of the model that runs must know `families` or `shared`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Segments that attend in one call: S of them, at most L tokens each, after a beginning of P tokens."""

    queries: torch.Tensor
    """[S, L] int64: positions of the tokens; the last one is repeated where a segment is shorter."""
    keys: torch.Tensor
    """[S, P + L] int64: positions of the tokens before and in the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """All segments of a packed batch."""

    families: tuple[Family, ...]
    outputs: torch.Tensor
    """[T] int64: the index of each token's output among those of all families, one after the other."""

    def to(self, device: torch.device | str) -> Families:
        """Returns the same on another device."""
        return Families(
            families=tuple(Family(queries=f.queries.to(device), keys=f.keys.to(device)) for f in self.families),
            outputs=self.outputs.to(device),
        )


def families_of(segments: Sequence[Segment]) -> Families:
    """Groups segments, which cover positions 0 to T, into families that attend together."""
    alike: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        alike.setdefault((segment.begin, -(-segment.length // LENGTH_STEP)), []).append(segment)
    families, begin = [], 0
    outputs = np.empty(sum(s.length for s in segments), dtype=np.int64)
    for members in alike.values():
        longest = max(s.length for s in members)
        queries = np.stack([s.start + np.minimum(np.arange(longest), s.length - 1) for s in members])
        keys = np.concatenate([np.stack([s.prefix for s in members]), queries], axis=1)
        families.append(Family(queries=torch.from_numpy(queries), keys=torch.from_numpy(keys)))
        for number, segment in enumerate(members):
            outputs[segment.places] = begin + number * longest + np.arange(segment.length)
        begin += queries.size
    return Families(families=tuple(families), outputs=torch.from_numpy(outputs))


def install(model: PreTrainedModel) -> None:
    """Makes `model` use packed attention, which without `families` is plain causal attention.

    Models that cannot have it (see `why_not_packed`) keep theirs.
    """
    if why_not_packed(model):
        return
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _padding_mask)
    model.set_attn_implementation(PACKED_ATTENTION)


@contextmanager
def telling(is_told: bool) -> Iterator[None]:
    """Has a model fail inside whose layers do not pass on to their attention what they are told, as some of transformers do not."""
    token = _is_told.set(is_told)
    try:
        yield
    finally:
        _is_told.reset(token)


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that cannot compute packed rows."""
    if reason := why_not_packed(model):
        raise ValueError(f"{type(model).__name__} cannot compute packed rows: {reason}; set train.rows.pack: false")


def refuse_unshareable(model: PreTrainedModel, shared: SharedSequences) -> None:
    """Raises ValueError for a model whose sequences the workers cannot share."""
    num_heads = model.config.get_text_config().num_attention_heads
    uneven = f"it has {num_heads} attention heads" if num_heads % shared.size else ""
    if reason := why_not_packed(model) or uneven:
        raise ValueError(
            f"train.deepspeed.sequence_parallel: {shared.size} workers cannot share the sequences of {type(model).__name__}: {reason}"
        )


def why_not_packed(model: PreTrainedModel) -> str:
    """Says why rows cannot be packed for this model; empty if they can."""
    config = model.config.get_text_config()  # a model with pictures has its layers there
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' AttentionInterface"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}, which would reach across rows"
    # Qwen's configs carry a window that no layer uses; their layer types, checked above, say so.
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        return f"sliding_window is {config.sliding_window}, which would reach across rows"
    return ""


def _packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    families: Families | None = None,
    shared: SharedSequences | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Maps query, key, value [1, heads, T, D] to [1, T, heads, D]; every segment attends to its prefix and, causally, itself.

    Without `families` the arguments are [B, heads, T, D], of rows padded on the right. Where sequences are `shared`, T is this worker's part.
    """
    is_plain = families is None and shared is None
    if _is_told.get() and (is_plain or attention_mask is not None):
        reason = "its layers do not say which rows there are" if is_plain else "it has a mask of its own"
        raise ValueError(
            f"{type(module).__name__} cannot compute packed rows or parts of rows: {reason}; set train.rows.pack: false and "
            "train.deepspeed.sequence_parallel: 1"
        )
    if shared is not None:
        # Keys and values of fewer heads than workers are repeated, until each worker has one.
        num_kv_heads = lcm(key.shape[1], shared.size)
        key, value = (x.repeat_interleave(num_kv_heads // x.shape[1], dim=1) for x in (key, value))
        parted = SimpleNamespace(
            num_key_value_groups=query.shape[1] // num_kv_heads, is_causal=getattr(module, "is_causal", True)
        )

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            with telling(False):
                attended, _ = _packed_attention(parted, query, key, value, attention_mask, families, **settings)
            # The parts of shared sequences are equally long: behind the rows may be tokens of none.
            return F.pad(attended, (0, 0, 0, 0, 0, query.shape[2] - attended.shape[1]))

        return shared.attend(attention, *(x.transpose(1, 2) for x in (query, key, value))), None
    if families is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for family in families.families:
        length, num_keys = family.queries.shape[1], family.keys.shape[1]
        mask = None  # then attention is causal
        if (
            num_keys > length
        ):  # every query sees the whole prefix: the triangle begins after its num_keys - length columns
            mask = torch.ones(length, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - length)[None, None]
        parts = (_pick(q, family.queries), _pick(k, family.keys), _pick(v, family.keys))
        outputs.append(sdpa_attention_forward(module, *parts, mask, **settings)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, families.outputs)[None], None


def _pick(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Picks tokens: [T, heads, D] and positions [S, L] -> [S, heads, L, D]."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _padding_mask(*args: Any, attention_mask: torch.Tensor | None = None, **settings: Any) -> torch.Tensor | None:
    """Returns the mask of a padded batch; for packed rows None, where transformers would build a dense T x T mask."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **settings)
