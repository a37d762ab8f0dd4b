"""critic: a Hugging Face trunk and a linear head -> the value of each completion token's state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from train_loops.batching import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_FILE = "value_head.safetensors"


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

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> ValueModel:
        """What `save` wrote. Raises ValueError where `folder` holds no value head."""
        path = Path(folder) / HEAD_FILE
        if not path.exists():
            raise ValueError(f"{folder} has no {HEAD_FILE}: not a critic; start one with ValueModel.from_policy")
        model = cls.from_policy(folder, dtype=dtype)
        model.head.load_state_dict(load_file(path))
        return model

    def save(self, folder: str | Path, *, state: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Writes trunk and head. `state`: the gathered `state_dict` where parameters are partitioned (ZeRO-3)."""
        path = Path(folder)
        state = {name: x.detach().cpu().contiguous() for name, x in (state or self.state_dict()).items()}
        self.trunk.save_pretrained(path, state_dict=_below(state, "trunk."))
        save_file(_below(state, "head."), path / HEAD_FILE)
        return path

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


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
