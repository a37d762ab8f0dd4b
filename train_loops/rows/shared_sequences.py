"""shared_sequences: workers that compute the same rows together, each a part of their tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

    [B, T] ──each worker its T / n──> layers ── attention: all T tokens, heads / n ── layers ──gathered──> hidden states of [B, T]

Activations of a row then need the memory of n workers, so that it may be n times as long. The attention's exchange is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps query, key, value [B, T, heads, D] to [B, T, heads, D]."""


class SharedSequences:
    """The `size` workers, of consecutive ranks, of which this one is the one at `place`."""

    def __init__(self, size: int) -> None:
        """Every worker makes it at the same time. Raises ValueError where the workers are no multiple of `size`."""
        num_workers, rank = dist.get_world_size(), dist.get_rank()
        if num_workers % size:
            raise ValueError(f"deepspeed.sequence_parallel: {num_workers} workers are no groups of {size}")
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, num_workers, size)]
        self.size, self.place, self.group = size, rank % size, groups[rank // size]

    def part_of(self, x: torch.Tensor, *, dim: int, padding: float = 0) -> torch.Tensor:
        """Returns this worker's part of a dimension, which is filled up to parts of equal size."""
        missing = -x.shape[dim] % self.size
        filled = F.pad(x, (*[0, 0] * (x.ndim - 1 - dim), 0, missing), value=padding)
        return filled.chunk(self.size, dim=dim)[self.place]

    def gathered(self, part: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Returns the parts of all workers; the gradient of a part is the sum of those that all workers have for it."""
        gathered: torch.Tensor = _Gathered.apply(part.transpose(0, dim), self)
        return gathered.transpose(0, dim)

    def attend(self, attention: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Maps parts [B, T / n, heads, D] to such a part; `attention` sees all tokens and a part of the heads."""
        from deepspeed.sequence.layer import DistributedAttention

        return DistributedAttention(attention, self.group, scatter_idx=2, gather_idx=1)(query, key, value, 0)


class _Gathered(torch.autograd.Function):
    """Joins the parts of all workers at dimension 0. (The one of torch fails with gloo in all groups but the first.)"""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, shared: SharedSequences) -> torch.Tensor:
        ctx.shared = shared
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(shared.size)]
        dist.all_gather(parts, part.contiguous(), group=shared.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.shared.group)
        return summed.chunk(ctx.shared.size)[ctx.shared.place], None


@cache
def shared_sequences(size: int) -> SharedSequences | None:
    """Returns the group of this process; None where no rows are shared."""
    return None if size == 1 else SharedSequences(size)
