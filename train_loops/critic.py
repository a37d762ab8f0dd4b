"""critic: a Hugging Face trunk and a linear head -> the value of each completion token's state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from train_loops.batching import Batch
from train_loops.logprobs import at_least_float32, hidden_states
from train_loops.packed_attention import install

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """V(s): s is everything before a token. The head starts at zero, so that the first values are all zero."""

    trunk: PreTrainedModel

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        install(trunk)
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.hidden_size, 1, dtype=next(trunk.parameters()).dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> ValueModel:
        """A fresh critic on the trunk of the policy in `folder` (Hugging Face layout)."""
        from transformers import AutoModel

        return cls(AutoModel.from_pretrained(folder, dtype=dtype))

    def forward(self, batch: Batch) -> torch.Tensor:
        """[N] float32: the value of the state in which each completion token was sampled."""
        hidden = hidden_states(self.trunk, batch)
        return at_least_float32(self.head(hidden).squeeze(-1))[: len(batch.targets)]


def completion_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[N] float32. `model`: a `ValueModel`, or a DeepSpeed engine around one."""
    return model(batch)
