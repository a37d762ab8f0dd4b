"""export: an engine around a policy, and the folder that it was loaded from -> the folder of its next version.

parameters, gathered one by one --as transformers saves them, layer by layer--> the tensors of the parent's files
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stores.weights.manifest import read_safetensors_header
from train_loops.engine.checkpoints import NAME_OF, write_safetensors
from train_loops.engine.deepspeed_engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "manifest.json", "train_result.json")
"""The files of the parent's folder that a new version does not inherit."""
LAYER = re.compile(r".*?\.\d+\.")
"""What the names of the parameters of one layer begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """What an export holds: the tensors of the parent's files, under their names."""

    names: Collection[str]
    """The parameters that are written, by their names in the model."""
    kept: Mapping[str, Path]
    """The tensors that are no parameters (buffers, heads of other uses), and the parent's file out of which each is copied."""
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]


def export_weights(engine: Engine, *, parent: str | Path, out: str | Path) -> Path:
    """Writes a `PolicyScorer` engine's model as a Hugging Face folder; all workers call it, worker 0 writes.

    Names, shapes and tying are the parent's, so that a running engine can load one over the other: a tied head that the
    parent's file stores all the same is stored again. Config and tokenizer files are copied from it.

    The dtype is the trainer's, and config.json says so: in the bfloat16 of a published folder a step of float32 weights
    would mostly be rounded away, and what is served would not be what was trained.

    Args:
        engine: around a `PolicyScorer`.
        parent: folder of the version that was trained from.
        out: folder to write.

    Raises:
        ValueError: see `export_layout`.
    """
    parent, out = Path(parent), Path(out)
    model: Any = engine.module.model
    layout = export_layout(model, parent)
    trained = engine.tensors(model, names=layout.names)
    if torch.distributed.get_rank() == 0:
        shutil.copytree(parent, out, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        tensors = (tensor for _, tensor in chain(_as_saved(model, trained, layout.shapes), _read(layout.kept)))
        write_safetensors(out / WEIGHTS_FILE, layout.shapes, tensors, dtypes=layout.dtypes, metadata={"format": "pt"})
        _say_dtype(out / "config.json", next(model.parameters()).dtype)
    else:
        for _ in trained:  # the others take part in every collective
            pass
    return out


def export_layout(model: Any, parent: Path) -> ExportLayout:
    """Says what an export of `model`, which was loaded from `parent`, holds; no tensor is read.

    Raises ValueError where transformers would save the model under other names or in other shapes than those of the parent's files.
    """
    files = sorted(parent.glob("*.safetensors"))
    place_of = {name: file for file in files for name in read_safetensors_header(file)}
    stored = {name: entry for file in files for name, entry in read_safetensors_header(file).items()}
    empty = {
        name: torch.empty(tuple(getattr(p, "ds_shape", p.shape)), dtype=p.dtype, device="meta")
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    first = dict(model.named_parameters())
    names = [n for n in empty if n in first or dict(_as_saved(model, [(n, empty[n])], stored)).keys() <= stored.keys()]
    saved = {
        name: (NAME_OF[tensor.dtype], tuple(tensor.shape))
        for name, tensor in _as_saved(model, ((n, empty[n]) for n in names), stored)
    }
    for name, (_, shape) in saved.items():
        if name not in stored or stored[name][1] != shape:
            raise ValueError(
                f"{parent} has no tensor {name!r} of shape {list(shape)}, as which the model that is trained from it is saved: "
                "load the folder with transformers, and adopt what save_pretrained makes of it"
            )
    kept = {name: place_of[name] for name in stored if name not in saved}
    entries = saved | {name: stored[name] for name in kept}
    return ExportLayout(
        names=names,
        kept=kept,
        shapes={name: shape for name, (_, shape) in entries.items()},
        dtypes={name: dtype for name, (dtype, _) in entries.items()},
    )


def _as_saved(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], stored: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives parameters the names and shapes of files, as `save_pretrained` does: what transformers did when it loaded them is undone.

    It is done layer by layer: no more than that is in memory, and no conversion joins tensors of two layers.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for _, part in groupby(tensors, key=lambda named: LAYER.findall(named[0])[:1]):
        for name, tensor in revert_weight_conversion(model, dict(part)).items():
            bare = name.removeprefix(
                f"{model.base_model_prefix}."
            )  # it is added in loading where files do without: gpt2
            yield bare if bare in stored else name, tensor


def _read(place_of: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for name, file in place_of.items():
        with safe_open(file, framework="pt") as tensors:
            yield name, tensors.get_tensor(name)


def save_model(model: PreTrainedModel, out: Path, *, source: Path) -> None:
    """Writes config and weights of a model that was loaded from `source`, and copies that folder's generation_config.json.

    transformers reads some of these files that it refuses to write, e.g. with a temperature and no do_sample.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    model.save_pretrained(out)
    if (file := source / "generation_config.json").is_file():
        shutil.copyfile(file, out / file.name)


def _say_dtype(file: Path, dtype: torch.dtype) -> None:
    """Makes a config.json name the dtype of the weights beside it: transformers loads them in the one that it names."""
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config") or {}):
        part.pop("torch_dtype", None)  # its name before transformers 5
        part["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n")
