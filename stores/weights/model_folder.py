"""model_folder: a model folder in Hugging Face layout -> what is wrong with its files.

Reads the config, the index, and the headers of the safetensors files; no tensor, and here neither torch nor transformers is
imported: what transformers makes of the folder is asked in `loading`. Every error names the file and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stores.files import read_json_object
from stores.weights.loading import LoadingFaults, loading_faults
from stores.weights.manifest import read_safetensors_header

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

INDEX = "model.safetensors.index.json"
CONVERT = "load it with transformers and save it with save_pretrained"
COPY = "copy config and weights from one source"
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""Keys of config.json whose values are numbers of 1 or more."""
ALWAYS_WINDOWED = ("gemma2", "gemma3")
"""Beginnings of types whose layers take turns between a window and all tokens also where config.json says nothing."""
QUANTIZED = ("quantization_config", "compression_config")
CONTINUES_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "WithLMHead")
"""Ends of the names of classes with a head over the vocabulary."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_model_files(folder: Path) -> dict[str, Any]:
    """Returns the config of a folder whose config and weights fit together; ValueError for the first thing that is wrong.

    Where transformers is installed (`can_load`), it says what the model needs; else only sizes and the number of layers are compared.
    """
    config = read_config(folder)
    tensors = read_tensors(folder)
    check_sizes(folder, config, tensors)
    if (faults := loading_faults(folder)) is not None:
        _refuse(folder, config, faults)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json; ValueError where it is missing or broken, and where the model needs code of its own or cannot be a policy."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"folder {folder} has no model config (config.json): save it beside the weights")
    config = read_json_object(file)
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and "auto_map" in read_json_object(folder / name):
            raise ValueError(
                f"{folder / name} has auto_map: it asks for code out of the model folder, which is never run here. If "
                f"transformers knows model_type {config.get('model_type')!r} itself, remove auto_map; else take another model"
            )
    if not isinstance(config.get("model_type"), str):
        raise ValueError(
            f"{file} has no model_type, which says how the model is built: copy config.json from its source"
        )
    _check_is_policy(file, config)
    return config


def _check_is_policy(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a model that transformers loads and that cannot be a policy."""
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any(name.endswith(CONTINUES_TEXT) for name in names):
        raise ValueError(
            f"{file}: architectures = {', '.join(names)}: that model does not continue a text, and its head would be left out: take "
            "the folder of the causal language model"
        )
    settings = next((s for key in QUANTIZED if (s := _text_config(config).get(key)) is not None), None)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise ValueError(
            f"{file}: the weights are quantized ({method}), and only plain ones can be trained and proven to be served: take the "
            "folder in bfloat16 or float32, or dequantize it and save it with save_pretrained"
        )


def read_tensors(folder: Path) -> Tensors:
    """Returns dtype and shape of every tensor; ValueError where files are missing, cut, surplus, or not safetensors."""
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
    if index.is_file():
        return _sharded(files, index)
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
        found = f"only {pickled[0]}, which is not read" if pickled else "no weights"
        raise ValueError(f"folder {folder} has no *.safetensors but {found}: {CONVERT}")
    if len(files) > 1:
        names = ", ".join(files)
        raise ValueError(
            f"folder {folder} has several weight files ({names}) and no {INDEX} that says which tensor is where: keep those of "
            f"one save, and copy its index beside them"
        )
    (file,) = files.values()
    return _header(file)


def _sharded(files: Mapping[str, Path], index: Path) -> Tensors:
    """Compares an index with the shards beside it."""
    place_of = read_json_object(index).get("weight_map")
    if not isinstance(place_of, dict) or not place_of or not all(isinstance(name, str) for name in place_of.values()):
        raise ValueError(f"{index} has no weight_map (tensor: file): copy it from the model's source, or {CONVERT}")
    shards = sorted(set(place_of.values()))
    if missing := [name for name in shards if name not in files]:
        raise ValueError(
            f"{index.parent / missing[0]} is missing ({len(missing)} of {len(shards)} files that {index.name} names): copy it from "
            "the model's source"
        )
    if surplus := [name for name in files if name not in shards]:
        raise ValueError(
            f"{index.parent / surplus[0]} is not named by {index.name}: an engine would load it as a second copy of the weights; "
            "remove it"
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in shards:
        header = _header(files[name])
        listed = {tensor for tensor, file in place_of.items() if file == name}
        if odd := sorted(listed ^ header.keys()):
            where = "is listed there and not in the file" if odd[0] in listed else "is in the file and not listed there"
            raise ValueError(
                f"{files[name]} and {index.name} are not of one save: tensor {odd[0]} {where}; copy both from the model's source"
            )
        tensors |= header
    return tensors


def _header(file: Path) -> Tensors:
    try:
        tensors = read_safetensors_header(file)
    except ValueError as error:
        raise ValueError(f"{error}: copy it again from the model's source") from None
    if not tensors:
        raise ValueError(f"{file} holds no tensor: copy it again from the model's source")
    return tensors


def check_sizes(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Compares hidden size, vocabulary and number of layers with the weights; ValueError for the first that cannot be.

    Whatever a config claims, nothing is built here: what it says of these three must be seen before anybody builds a model.
    """
    shape, file = _text_config(config), folder / "config.json"
    for key in COUNTS:
        value = shape.get(key)
        sizes = value if isinstance(value, list) and value else [value]  # Gemma 3n has one per layer
        if value is not None and not all(type(size) is int and size >= 1 for size in sizes):
            raise ValueError(f"{file}: {key} = {value!r} is no size of 1 or more: correct it")
    dimensions = {size for _, shape_of_tensor in tensors.values() for size in shape_of_tensor}
    for key in ("hidden_size", "vocab_size"):
        if shape.get(key) is not None and shape[key] not in dimensions:
            raise ValueError(
                f"{file} says {key} = {shape[key]}, and no tensor of the weights has that dimension: correct the config, or {COPY}"
            )
    count = shape.get("num_hidden_layers")
    layers = {int(match[1]) for name in tensors if (match := LAYER.search(name)) and "vision" not in name}
    if count is not None and layers and len([layer for layer in layers if layer < count]) < count:
        raise ValueError(
            f"{file} says num_hidden_layers = {count}, but the weights hold {len(layers)} layers ({min(layers)} to {max(layers)}): "
            f"correct the config, or {COPY}"
        )


def _refuse(folder: Path, config: Mapping[str, Any], faults: LoadingFaults) -> None:
    """Raises ValueError for the first of the faults."""
    shape, file, weights = _text_config(config), folder / "config.json", _weights_file(folder)
    model = f"a model of type {shape['model_type']} with {', '.join(f'{k} = {shape[k]}' for k in COUNTS if k in shape)}"
    if faults.error:
        raise ValueError(f"{file}: the installed transformers cannot build it ({faults.error}): correct it, or {COPY}")
    for name, (stored, built) in faults.shapes.items():
        raise ValueError(
            f"{file} describes {model}, so that {name} would have the shape {built}, but in the weights it has {stored}: correct the "
            f"config, or {COPY}"
        )
    if faults.missing:
        name = max(faults.missing, key=lambda name: not name.endswith("lm_head.weight"))  # the head alone may be tied
        head = f" (or {file} must say tie_word_embeddings = true)" if name.endswith("lm_head.weight") else ""
        raise ValueError(
            f"{weights} does not hold {name}{head}, which {model} needs, but tensors like {next(iter(faults.surplus), 'the others')}: "
            f"{COPY}, or {CONVERT}"
        )
    for name in faults.surplus:
        if LAYER.search(name) and "vision" not in name:
            raise ValueError(
                f"{weights} holds {name}, which {model} has not as {file} describes it, so that it would be left out: correct the "
                f"config, or {COPY}"
            )


def why_windowed(config: Mapping[str, Any]) -> str:
    """Says which layers of a model attend to less than all earlier tokens, by its config.json; empty if none does.

    `packed_attention.why_not_packed` looks at the model itself; this one is for before there is one.
    """
    shape = _text_config(config)
    kinds = shape.get("layer_types")
    if isinstance(kinds, list):
        others = sorted({str(kind) for kind in kinds} - {"full_attention"})
        return f"the model has layers of {', '.join(others)}" if others else ""
    model_type, window = str(shape.get("model_type")), shape.get("sliding_window")
    if model_type.startswith(ALWAYS_WINDOWED):
        return f"models of type {model_type} have layers of sliding_attention"
    if model_type.startswith("qwen") and not shape.get("use_sliding_window"):
        return ""  # their configs carry a window that no layer uses
    return f"the model has sliding_window = {window}" if window else ""


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with that of its text model on top, where the model has others for pictures or sound."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def _weights_file(folder: Path) -> Path:
    """Returns the file that says which tensors there are: the index, or the only weights."""
    index = folder / INDEX
    return index if index.is_file() else next(iter(sorted(folder.glob("*.safetensors"))), folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How many rows of a model's vocabulary stand for a token."""

    num_tokens: int
    """One more than the largest token id of the tokenizer."""
    num_rows: int
    """Rows of the embeddings and of the head."""

    @property
    def num_padded(self) -> int:
        """Rows behind the last token: they may be sampled, and no tokenizer can read them."""
        return max(0, self.num_rows - self.num_tokens)


def vocabulary_rows(folder: Path) -> Vocabulary | None:
    """Compares tokenizer.json and config.json of a folder; None where one of them is missing or does not say."""
    tokenizer, config = folder / "tokenizer.json", folder / "config.json"
    if not tokenizer.is_file() or not config.is_file():
        return None
    num_rows = _text_config(read_json_object(config)).get("vocab_size")
    data = read_json_object(tokenizer)
    words = (data.get("model") or {}).get("vocab") or {}
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    ids += [token["id"] for token in data.get("added_tokens") or []]
    return Vocabulary(num_tokens=max(ids) + 1, num_rows=num_rows) if ids and isinstance(num_rows, int) else None


def num_known_rows(folder: Path) -> int | None:
    """Returns the number of rows that stand for a token; None where all of them do, or nobody says."""
    vocabulary = vocabulary_rows(folder)
    return vocabulary.num_tokens if vocabulary is not None and vocabulary.num_padded else None
