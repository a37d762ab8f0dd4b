"""model_folder: a model folder in Hugging Face layout -> what is wrong with its files, read without torch or transformers.

Reads the config, the index, and the headers of the safetensors files; no tensor. Every error names the file and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stores.files import read_json_object
from stores.weights.decoder_shapes import (
    FAMILIES,
    SIZES,
    Family,
    expected_tensors,
    filled,
    is_known_part,
    layer_tensors,
)
from stores.weights.manifest import read_safetensors_header
from stores.weights.model_types import is_known_type

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

INDEX = "model.safetensors.index.json"
CONVERT = "load it with transformers and save it with save_pretrained"
EMBEDDINGS = re.compile(r"(?:(?:model|language_model|text_model)\.)*embed_tokens\.weight")
"""Names of the embeddings that transformers and engines load; other beginnings, like `_orig_mod.`, they do not."""
ALWAYS_WINDOWED = ("gemma2", "gemma3")
"""Beginnings of types whose layers take turns between a window and all tokens also where config.json says nothing."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_model_files(folder: Path) -> dict[str, Any]:
    """Returns the config of a folder whose config and weights fit together; ValueError for the first thing that is wrong.

    A type that transformers does not have is refused where transformers is installed, since no trainer could build it.
    """
    config = read_config(folder)
    if is_known_type(config["model_type"]) is False:
        raise ValueError(
            f"{folder / 'config.json'} has model_type = {config['model_type']!r}, which the installed transformers cannot build: correct it, or "
            "take another model"
        )
    check_shapes(folder, config, read_tensors(folder))
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Returns config.json; ValueError where it is missing or broken, or where the model needs code of its own."""
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
    return config


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


def check_shapes(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Compares the weights with the tensors that the config leads to; ValueError for the first that differs or is missing.

    Of a decoder built like Llama (`FAMILIES`) every tensor is expected by name and shape. Of any other type the names are
    not known here: compared are the hidden size, the rows of the vocabulary, embeddings, head, and the number of layers.
    Quantized weights have names and shapes of their own but for norms, and of them only those are compared.
    """
    shape = _text_config(config)
    file = folder / "config.json"
    for key in COUNTS:
        value = shape.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{file}: {key} = {value!r} is no size of 1 or more: correct it")
    family = FAMILIES.get(shape["model_type"])
    if family is not None:
        _check_family(folder, family, config, tensors)
    elif "quantization_config" not in config:
        _check_hidden_size(file, shape, tensors)
        _check_vocabulary(file, shape, tensors)
        _check_layers(file, shape, tensors)
        if shape.get("tie_word_embeddings") is False and _rows(tensors, "embed_tokens.weight"):
            _check_head(file, tensors)


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


def knows_all_tensors(config: Mapping[str, Any]) -> bool:
    """Returns whether `check_shapes` compares every tensor of the language model."""
    return _text_config(config).get("model_type") in FAMILIES and "quantization_config" not in config


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with that of its text model on top, where the model has others for pictures or sound."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def _check_family(folder: Path, family: Family, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Compares every tensor of the language model, norms alone where it is quantized."""
    given, is_inner = _text_config(config), isinstance(config.get("text_config"), dict)
    file, weights = folder / "config.json", _weights_file(folder)
    lacking = [key for key in SIZES if given.get(key) is None]
    if lacking and not is_inner:  # a text model within another may leave out what is the default of its type
        value = family.sizes[SIZES.index(lacking[0])]
        raise ValueError(
            f"{file} has no {lacking[0]}, for which transformers would take {value}: copy config.json from its source"
        )
    shape = filled(family, given)
    is_quantized = "quantization_config" in config
    embeddings = [name for name in tensors if EMBEDDINGS.fullmatch(name)]
    if not embeddings:
        raise ValueError(
            f"{weights} holds no embed_tokens.weight of a model of type {shape['model_type']}, but {len(tensors)} tensors like "
            f"{min(tensors)}: copy the weights from the model's source, or {CONVERT}"
        )
    if not is_quantized:
        _check_hidden_size(file, shape, tensors)
    prefix = embeddings[0].removesuffix("embed_tokens.weight")
    _check_layers(file, shape, tensors)
    if not given.get("tie_word_embeddings", is_inner or family.is_tied):
        _check_head(file, tensors)
    heads = tuple(_rows(tensors, "lm_head.weight"))
    for expected in expected_tensors(family, shape, prefix=prefix, heads=heads):
        if is_quantized and not expected.name.endswith("norm.weight"):
            continue
        said = ", ".join(f"{key} = {shape[key]}" for key in expected.keys)
        if expected.name not in tensors:
            raise ValueError(
                f"{weights} does not hold {expected.name}, which a model of type {shape['model_type']} with {said} needs: copy config "
                "and weights from one source"
            )
        _check_shape(file, said, expected.name, tensors[expected.name][1], expected.shape)
    if not is_quantized:
        _check_surplus(file, weights, family, shape, prefix, tensors)


def _check_surplus(
    file: Path, weights: Path, family: Family, shape: Mapping[str, Any], prefix: str, tensors: Tensors
) -> None:
    """ValueError for biases and norms in a layer that this config has no place for: they would be left out in silence."""
    parts = {part.name for part in layer_tensors(family, shape)}
    for name in tensors:
        part = name.removeprefix(f"{prefix}layers.").partition(".")[2] if name.startswith(f"{prefix}layers.") else ""
        if is_known_part(part) and part not in parts:
            raise ValueError(
                f"{weights} holds {name}, which a model of type {shape['model_type']} has not as {file} describes it, so that it would be "
                "left out: correct the config, or copy config and weights from one source"
            )


def _check_head(file: Path, tensors: Tensors) -> None:
    if not any(name.endswith("lm_head.weight") for name in tensors):
        raise ValueError(
            f"{file} says tie_word_embeddings = false, or leaves it out for that default, but the weights hold no lm_head.weight: set "
            "it to true, or copy the missing tensor's file"
        )


def _check_hidden_size(file: Path, shape: Mapping[str, Any], tensors: Tensors) -> None:
    hidden = shape.get("hidden_size")
    if hidden is not None and not any(hidden in dimensions for _, dimensions in tensors.values()):
        raise ValueError(
            f"{file} says hidden_size = {hidden}, and no tensor of the weights has that dimension: correct the config, or copy config "
            "and weights from one source"
        )


def _check_vocabulary(file: Path, shape: Mapping[str, Any], tensors: Tensors) -> None:
    """Compares embeddings and head of a model of a type that is not known here."""
    hidden, vocabulary = shape.get("hidden_size"), shape.get("vocab_size")
    if vocabulary and not any(vocabulary in dimensions for _, dimensions in tensors.values()):
        raise ValueError(
            f"{file} says vocab_size = {vocabulary}, and no tensor of the weights has a row for each token: correct the config, or copy "
            "config and weights from one source"
        )
    if hidden and vocabulary and "word_embed_proj_dim" not in shape:
        for suffix in ("embed_tokens.weight", "lm_head.weight"):
            for name, actual in _rows(tensors, suffix).items():
                said = f"vocab_size = {vocabulary}, hidden_size = {hidden}"
                _check_shape(file, said, name, actual, (vocabulary, hidden))


def _check_shape(file: Path, said: str, name: str, actual: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if actual != wanted:
        raise ValueError(
            f"{file} says {said}, so that {name} would have the shape {list(wanted)}, but in the weights it has {list(actual)}: correct "
            "the config, or copy config and weights from one source"
        )


def _check_layers(file: Path, shape: Mapping[str, Any], tensors: Tensors) -> None:
    count = shape.get("num_hidden_layers")
    layers = {int(match[1]) for name in tensors if (match := LAYER.search(name)) and "vision" not in name}
    if count is None or not layers:
        return
    # Models with layers for speculation store more than they name.
    surplus = len(layers) > count if shape.get("model_type") in FAMILIES else False
    if surplus or len([layer for layer in layers if layer < count]) < count:
        raise ValueError(
            f"{file} says num_hidden_layers = {count}, but the weights hold {len(layers)} layers ({min(layers)} to {max(layers)}): "
            "correct the config, or copy config and weights from one source"
        )


def _rows(tensors: Tensors, suffix: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of the language model whose names end so."""
    return {name: shape for name, (_, shape) in tensors.items() if name.endswith(suffix) and "vision" not in name}


def _weights_file(folder: Path) -> Path:
    """Returns the file that says which tensors there are: the index, or the only weights."""
    index = folder / INDEX
    return index if index.is_file() else next(iter(sorted(folder.glob("*.safetensors"))), folder)


COUNTS = (*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings")
"""Keys of config.json whose values are numbers of 1 or more."""


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
    shape = read_json_object(config)
    text = shape.get("text_config")
    num_rows = (text if isinstance(text, dict) and "vocab_size" in text else shape).get("vocab_size")
    data = read_json_object(tokenizer)
    words = (data.get("model") or {}).get("vocab") or {}
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    ids += [token["id"] for token in data.get("added_tokens") or []]
    return Vocabulary(num_tokens=max(ids) + 1, num_rows=num_rows) if ids and isinstance(num_rows, int) else None


def num_known_rows(folder: Path) -> int | None:
    """Returns the number of rows that stand for a token; None where all of them do, or nobody says."""
    vocabulary = vocabulary_rows(folder)
    return vocabulary.num_tokens if vocabulary is not None and vocabulary.num_padded else None
