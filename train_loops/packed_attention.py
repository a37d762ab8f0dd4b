"""packed_attention: rows laid end to end in one -> attention of each row to itself only, without a T x T mask.

Linear layers and norms see one [1, T] row without padding. Only attention takes the rows apart again, by views: rows
of the same length that lie side by side are one call. Installed as an attention function of transformers, so it works
in every model whose attention goes through that interface, with gradient checkpointing and under DeepSpeed.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "troupe_packed"
"""Name of the attention function in transformers."""


def install(model: PreTrainedModel) -> None:
    """Gives `model` the packed attention, which without `row_lengths` is plain causal attention.

    Models that cannot have it (see `why_not_packed`) keep theirs.
    """
    if why_not_packed(model):
        return
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _padding_mask)
    model.set_attn_implementation(PACKED_ATTENTION)


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that cannot compute packed rows."""
    if reason := why_not_packed(model):
        raise ValueError(f"{type(model).__name__} cannot compute packed rows: {reason}; set train.rows.pack: false")


def why_not_packed(model: PreTrainedModel) -> str:
    """Why rows cannot be packed for this model; empty if they can."""
    config = model.config
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
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row_lengths: tuple[int, ...] = (),
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Query, key, value [1, heads, T, D] -> [1, T, heads, D]; `row_lengths` add up to T. Causal in every row.

    Without `row_lengths`: [B, heads, T, D], rows padded on the right.
    """
    if not row_lengths:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    runs = [(length, len(list(same))) for length, same in groupby(row_lengths)]
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *parts in zip(runs, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True):
        rows = [x.unflatten(1, (count, length)).transpose(0, 1) for x in parts]
        outputs.append(sdpa_attention_forward(module, *rows, None, **settings)[0].flatten(0, 1))
    return torch.cat(outputs)[None], None


def _padding_mask(*args: Any, attention_mask: torch.Tensor | None = None, **settings: Any) -> torch.Tensor | None:
    """The mask of a batch that says which tokens are padding; None, not a dense block-diagonal one, for packed rows."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **settings)
