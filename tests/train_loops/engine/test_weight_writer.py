"""weight_writer: tensors one after the other make the file that safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from train_loops.engine.checkpoints import write_safetensors

pytestmark = pytest.mark.test


def test_written_tensors_are_read_back_bit_for_bit_in_their_dtypes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(()), "d": torch.empty(0, 4)}
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    write_safetensors(tmp_path / "x.safetensors", shapes, tensors.values(), dtypes={"b": "BF16"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
