"""A model folder -> the same one in another dtype, as published models are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def in_dtype(source: Path, out: Path, dtype: str) -> Path:
    """Writes the weights of `source` in `dtype` (`bfloat16`, `float16` or `float32`); config.json says so."""
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors"):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return out
