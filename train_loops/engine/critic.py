"""critic: a Hugging Face trunk and a head -> the value of the state in which each completion token was sampled."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from train_loops.engine.logprobs import hidden_states
from train_loops.rows.batching import Batch
from train_loops.rows.packed_attention import install
from train_loops.signal.losses import at_least_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def value_head(width: int, *, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """Builds a head, [N, width] -> [N, 1], linear or with one hidden layer.

    The last layer starts at zero, so that the first values are all zero. The hidden layer is always drawn with the same
    seed: every worker starts from the same weights, and so does a job that is done again.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        last = nn.Linear(hidden_size or width, 1, dtype=dtype)
        hidden = nn.Linear(width, hidden_size, dtype=dtype) if hidden_size else None
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return last if hidden is None else nn.Sequential(hidden, nn.Tanh(), last)


class ValueModel(nn.Module):
    """V(s): s is everything before a token. A model of its own, or a head on the features of a frozen trunk."""

    trunk: PreTrainedModel

    def __init__(self, trunk: PreTrainedModel, *, hidden_size: int = 0, is_frozen: bool = False) -> None:
        super().__init__()
        install(trunk)
        self.trunk = trunk.requires_grad_(not is_frozen)
        self._is_frozen = is_frozen
        dtype = next(trunk.parameters()).dtype
        self.head = value_head(trunk.config.get_text_config().hidden_size, hidden_size=hidden_size, dtype=dtype)

    @classmethod
    def from_policy(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        hidden_size: int = 0,
        is_frozen: bool = False,
    ) -> ValueModel:
        """Builds a fresh critic on the trunk of the policy in `folder` (Hugging Face layout)."""
        from transformers import AutoModel

        return cls(
            AutoModel.from_pretrained(folder, dtype=dtype, trust_remote_code=False),
            hidden_size=hidden_size,
            is_frozen=is_frozen,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns [N] float32: the value of the state in which each completion token was sampled."""
        with torch.no_grad() if self._is_frozen else nullcontext():
            hidden = hidden_states(self.trunk, batch)
        # An empty microbatch has one hidden state all the same, so that backward runs over every parameter.
        return at_least_float32(self.head(hidden).squeeze(-1))[: len(batch.targets)]
