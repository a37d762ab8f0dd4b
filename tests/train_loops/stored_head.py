"""stored_head: a tied model's folder -> one whose file stores the head as well, as some published models do."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def with_stored_head(folder: Path, out: Path, *, excess: float = 0.0) -> Path:
    """Copies `folder` to `out`; the head is the input embeddings plus `excess`."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + excess
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
