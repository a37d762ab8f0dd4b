"""checkpoints: weights and Adam moments of a DeepSpeed engine <-> one file by parameter, whatever ZeRO stage or workers.

    partitions of all workers --whole, one parameter at a time--> <tag>.safetensors (worker 0 writes)
    <tag>.safetensors --one parameter at a time--> the partition of every worker

`master.<name>` is the float32 weight, left out where the model version holds the same number, and `exp_avg.<name>` and
`exp_avg_sq.<name>` are Adam's moments; beside it `<tag>.json` holds the state that is not a tensor. DeepSpeed's own checkpoints fit one ZeRO stage and number of workers, and
its converter refuses models without its own annotations.

Reading or writing a whole parameter is a collective under ZeRO: all workers must do it for the same parameters in the same
order, also those that have nothing to write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stores.files import naming_file, read_json_object
from stores.weights.manifest import read_safetensors_header

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64},
    **{"BOOL": torch.bool, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64},
}
"""Dtypes by their name in the header of safetensors."""
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class Partitions:
    """The float32 weights and moments of an engine's trainable parameters, whole, wherever DeepSpeed keeps their parts."""

    def __init__(self, module: nn.Module, optimizer: Any, *, stage: int) -> None:
        """Args: optimizer: what `deepspeed.initialize` returned; stage: ZeRO stage, 0 to 3."""
        self._optimizer, self._stage = optimizer, stage
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every trainable parameter by its name in the module; a tied one comes once."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}

    def whole(self, name: str, key: str = "") -> torch.Tensor:
        """Returns a weight, or with `key` its moment, whole, float32 on the CPU. All workers call it."""
        parameter = self._parameters[name]
        if self._stage == 0:
            tensor = self._optimizer.state[parameter][key] if key else parameter.detach()
        else:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            tensor = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        return tensor.detach().to("cpu", torch.float32, copy=True).reshape(self.shapes()[name])

    @torch.no_grad()
    def put(self, name: str, value: torch.Tensor, key: str = "") -> None:
        """Sets a weight, or with `key` its moment, in the parts that this worker holds. All workers call it."""
        parameter = self._parameters[name]
        if self._stage == 0:
            target = self._optimizer.state[parameter][key] if key else parameter.detach()
            target.copy_(value)
        elif self._stage < 3:
            parameter.set_full_hp_param(value.to(parameter.device), key or None)  # type: ignore[attr-defined]  # DeepSpeed's
        else:
            self._put_part(parameter, value, key)
        if not key and self._stage > 0:
            self._put_working_copy(parameter, value)

    def begin(self, num_steps: int) -> None:
        """Creates Adam's state as after `num_steps`, with moments 0.

        DeepSpeed and torch create it in the first step only, and a checkpoint is loaded before that.
        """
        for flat in self._flat_parameters():
            step = torch.tensor(float(num_steps), dtype=torch.float32, device=flat.device)
            moments = {key: torch.zeros_like(flat, memory_format=torch.preserve_format) for key in MOMENTS}
            self._inner.state[flat] = {"step": step, **moments}
        if self._stage in (1, 2):
            self._optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._optimizer if self._stage == 0 else self._optimizer.optimizer

    def _flat_parameters(self) -> list[torch.Tensor]:
        """Returns the tensors by which Adam's state is keyed: parameters, or this worker's part of many of them."""
        if self._stage == 0:
            return list(self._parameters.values())
        if self._stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        name = "single_partition_of_fp32_groups"
        return list(getattr(self._optimizer, name, None) or self._optimizer.fp32_groups_flat_partition)

    def _put_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str) -> None:
        """Sets this worker's part under ZeRO-3, which pads the last worker's part; DeepSpeed's own setter does not."""
        find = self._optimizer._get_fp32_opt_state_partition
        part, _ = find(parameter, release_swap_buffers=False, optim_state_key=key or None)
        size, rank = part.numel(), self._optimizer._get_param_partition_rank(parameter)
        flat = value.flatten()[rank * size : (rank + 1) * size]
        part = part.detach()
        part.zero_()
        part[: len(flat)].copy_(flat)

    def _put_working_copy(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Sets the weights that the forward pass uses, which ZeRO keeps beside the float32 ones."""
        if self._stage < 3:
            parameter.detach().copy_(value)
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.detach().copy_(value)


def save_checkpoint(
    partitions: Partitions, folder: str | Path, *, tag: str, state: Mapping[str, Any], num_steps: int, but: str = ""
) -> None:
    """Writes weights, moments and `state` (JSON values); all workers call it, worker 0 writes, a tensor at a time.

    Args: but: weights of parameters whose names begin so are left out, unless it is empty: whoever loads has them already.
    """
    shapes = partitions.shapes()
    keys = ("", *MOMENTS) if num_steps else ("",)
    names = {
        f"{key or 'master'}.{name}": (name, key)
        for name in shapes
        for key in keys
        if key or not num_steps or not but or not name.startswith(but)
    }

    def tensors() -> Iterable[torch.Tensor]:
        for name, key in names.values():
            yield partitions.whole(name, key)

    if torch.distributed.get_rank() == 0:
        write_safetensors(
            Path(folder) / f"{tag}.safetensors", {full: shapes[name] for full, (name, _) in names.items()}, tensors()
        )
        about = {"state": dict(state), "num_steps": num_steps}
        file = Path(folder) / f"{tag}.json"
        with naming_file(file):
            file.write_text(json.dumps(about))
        return
    for _ in tensors():  # the others take part in every collective
        pass


def load_checkpoint(partitions: Partitions, folder: str | Path, *, tag: str) -> tuple[dict[str, Any], int]:
    """Restores what `save_checkpoint` wrote; returns its `state` and number of steps. All workers call it.

    Weights that it left out stay as they are.

    Raises ValueError where it is missing, damaged or of a model with other parameters.
    """
    from safetensors import safe_open

    folder = Path(folder)
    if not has_checkpoint(folder, tag=tag):
        raise ValueError(f"{folder} holds no checkpoint of {tag!r}")
    about, stored = read_json_object(folder / f"{tag}.json"), _shapes(folder, tag)
    if fault := _misfit(partitions.shapes(), stored):
        raise ValueError(f"checkpoint {folder / tag} is of another model: {fault}")
    with safe_open(folder / f"{tag}.safetensors", framework="pt") as file:
        if about["num_steps"]:
            partitions.begin(about["num_steps"])
        for name in partitions.shapes():
            if f"master.{name}" in stored:
                partitions.put(name, file.get_tensor(f"master.{name}"))
            for key in MOMENTS if about["num_steps"] else ():
                partitions.put(name, file.get_tensor(f"{key}.{name}"), key)
    return about["state"], about["num_steps"]


def has_checkpoint(folder: str | Path, *, tag: str) -> bool:
    """Says whether `folder` holds a checkpoint of `tag`."""
    return all((Path(folder) / f"{tag}.{end}").is_file() for end in ("json", "safetensors"))


def fits(partitions: Partitions, folder: str | Path, *, tag: str) -> bool:
    """Says whether `folder` holds a checkpoint of `tag` that is of the same parameters; ValueError names a file that is cut."""
    return has_checkpoint(folder, tag=tag) and not _misfit(partitions.shapes(), _shapes(folder, tag))


def _shapes(folder: str | Path, tag: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in read_safetensors_header(Path(folder) / f"{tag}.safetensors").items()}


def _misfit(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, tuple[int, ...]]) -> str:
    """Names the first parameter that a file lacks, has too many or has in another shape; empty if they all fit."""
    stored = {name.partition(".")[2]: shape for name, shape in tensors.items()}
    for name in sorted(shapes.keys() | stored.keys()):
        if shapes.get(name) != stored.get(name):
            return f"{name} is {stored.get(name, 'not there')}, wanted {shapes.get(name, 'nothing of that name')}"
    return ""


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
        dtypes: name -> one of `DTYPES`; None: all float32.
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
