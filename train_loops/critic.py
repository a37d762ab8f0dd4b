"""critic: a Hugging Face trunk and a linear head -> the value of each completion token's state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from train_loops.batching import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """V(s): s is everything before a token. The head starts at zero, so that the first values are all zero."""

    trunk: PreTrainedModel

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.hidden_size, 1, dtype=next(trunk.parameters()).dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> ValueModel:
        """A fresh critic on the trunk of the policy in `folder` (Hugging Face layout)."""
        from transformers import AutoModel

        return cls(AutoModel.from_pretrained(folder, dtype=dtype))

    def forward(self, token_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """[B, T-1] float32: at t the value of the state in which token t+1 was sampled; 0 outside `loss_mask`.

        Args:
            token_ids: [B, T], padded on the right.
            loss_mask: [B, T-1] bool.
        """
        hidden = self.trunk(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
        return self.head(hidden).squeeze(-1).float() * loss_mask


def completion_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[B, T-1] float32, 0 outside the loss mask. `model`: a `ValueModel`, or a DeepSpeed engine around one."""
    return model(batch.token_ids, batch.loss_mask)
