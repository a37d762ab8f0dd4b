"""weight_writer: writes tensors one after the other into a safetensors file, without holding them all in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from stores.files import naming_file

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their name in the header of safetensors."""
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[torch.Tensor],
    *,
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors`, which come in the order of `shapes`; the file appears whole or not at all.

    The header with all offsets comes first in the file, so that shapes must be known before the first tensor is.

    Args:
        shapes: the shape of every tensor, by name.
        tensors: on the CPU; they are converted to their dtype.
        dtypes: name -> `F32`, `BF16` or `F16`; None: all float32.
        metadata: entries of the header, e.g. {"format": "pt"}.
    """
    names = {name: (dtypes or {}).get(name, "F32") for name in shapes}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[names[name]].itemsize
        header[name] = {"dtype": names[name], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(path.name + ".part")
    try:
        with naming_file(path), part.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
                assert tuple(tensor.shape) == tuple(shape), f"{name} is {tuple(tensor.shape)}, not {tuple(shape)}"
                data = tensor.to(DTYPES[names[name]]).contiguous()
                file.write(data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk it takes what others need
        raise
    os.replace(part, path)
