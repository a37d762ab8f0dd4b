"""tensors: a Hugging Face folder -> its weights, checked against those that an engine was started with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stores.weights.manifest import read_safetensors_header

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(folder: str | Path) -> Shapes:
    """Returns names and shapes of all tensors in `folder`, by the headers of its files alone."""
    headers = [read_safetensors_header(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    return {name: shape for header in headers for name, (_, shape) in header.items()}


def load_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of the safetensors files in `folder`, on the CPU.

    Raises ValueError if there is no file, or one is damaged or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    return tensors


def check_tensors(tensors: dict[str, torch.Tensor], expected: Shapes, source: str) -> None:
    """Raises ValueError, naming the tensor, unless `tensors` has just the expected names and shapes, all finite.

    A missing tensor would silently keep the old policy's values.
    """
    import torch

    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"{source}: missing tensors {missing[:3]}, unknown tensors {unknown[:3]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{source}: {name} has shape {tuple(tensor.shape)}, the engine's is {expected[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source}: {name} has values that are not finite")
