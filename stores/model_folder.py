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
from stores.manifest import read_safetensors_header

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

INDEX = "model.safetensors.index.json"
CONVERT = "load it with transformers and save it with save_pretrained"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_model_files(folder: Path) -> dict[str, Any]:
    """Returns the config of a folder whose config and weights fit together; ValueError for the first thing that is wrong."""
    config = read_config(folder)
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
    except (AttributeError, KeyError, TypeError, IndexError):
        raise ValueError(f"{file} is not a safetensors file: its header lists no tensors; copy it again") from None
    except ValueError as error:
        raise ValueError(f"{error}: copy it again from the model's source") from None
    if not tensors:
        raise ValueError(f"{file} holds no tensor: copy it again from the model's source")
    return tensors


def check_shapes(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Compares the shapes in the weights with those that the config leads to; ValueError for the first that differs.

    Compared are embeddings and head of every model, and attention, MLP and number of layers of those built like Llama.
    Quantized weights have shapes of their own, and are not compared.
    """
    if "quantization_config" in config:
        return
    text = config.get("text_config")
    shape = {**config, **text} if isinstance(text, dict) else dict(config)
    file = folder / "config.json"
    for key in SIZES:
        value = shape.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{file}: {key} = {value!r} is no size of 1 or more: correct it")
    _check_sizes(file, shape, tensors)
    _check_layers(file, shape, tensors)
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    if shape.get("tie_word_embeddings") is False and not has_head and _rows(tensors, "embed_tokens.weight"):
        raise ValueError(
            f"{file} says tie_word_embeddings = false, but the weights hold no lm_head.weight: set it to true, or copy the missing "
            "tensor's file"
        )


def _check_sizes(file: Path, shape: Mapping[str, Any], tensors: Tensors) -> None:
    hidden = shape.get("hidden_size")
    if hidden is not None and not any(hidden in dimensions for _, dimensions in tensors.values()):
        raise ValueError(
            f"{file} says hidden_size = {hidden}, and no tensor of the weights has that dimension: correct the config, or copy config "
            "and weights from one source"
        )
    for suffix, keys, wanted in _expected(shape):
        for name, actual in _rows(tensors, suffix).items():
            if actual != wanted:
                said = ", ".join(f"{key} = {shape[key]}" for key in keys if shape.get(key) is not None)
                raise ValueError(
                    f"{file} says {said}, so that {name} would have the shape {list(wanted)}, but in the weights it has "
                    f"{list(actual)}: correct the config, or copy config and weights from one source"
                )


def _check_layers(file: Path, shape: Mapping[str, Any], tensors: Tensors) -> None:
    count = shape.get("num_hidden_layers")
    layers = {int(match[1]) for name in tensors if (match := LAYER.search(name)) and "vision" not in name}
    if count is None or not layers:
        return
    # Models with layers for speculation store more than they name.
    surplus = len(layers) > count if shape.get("model_type") in LIKE_LLAMA else False
    if surplus or len([layer for layer in layers if layer < count]) < count:
        raise ValueError(
            f"{file} says num_hidden_layers = {count}, but the weights hold {len(layers)} layers ({min(layers)} to {max(layers)}): "
            "correct the config, or copy config and weights from one source"
        )


def _rows(tensors: Tensors, suffix: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of the language model whose names end so."""
    return {name: shape for name, (_, shape) in tensors.items() if name.endswith(suffix) and "vision" not in name}


def _expected(shape: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], tuple[int, int]]]:
    """Returns (end of a tensor's name, keys of the config, shape), as far as the config says."""
    hidden, vocabulary = shape.get("hidden_size"), shape.get("vocab_size")
    found: list[tuple[str, tuple[str, ...], tuple[int, int]]] = []
    if hidden and vocabulary and "word_embed_proj_dim" not in shape:
        keys: tuple[str, ...] = ("vocab_size", "hidden_size")
        found += [(suffix, keys, (vocabulary, hidden)) for suffix in ("embed_tokens.weight", "lm_head.weight")]
    heads, inner = shape.get("num_attention_heads"), shape.get("intermediate_size")
    if shape.get("model_type") not in LIKE_LLAMA or not hidden or not heads:
        return found
    if inner:
        keys = ("intermediate_size", "hidden_size")
        found += [(f".mlp.{part}_proj.weight", keys, (inner, hidden)) for part in ("gate", "up")]
        found.append((".mlp.down_proj.weight", keys, (hidden, inner)))
    width = shape.get("head_dim") or (hidden // heads if shape["model_type"] in HEADS_SHARE_HIDDEN else None)
    if width:
        keys = ("num_attention_heads", "head_dim", "hidden_size")
        found.append((".self_attn.q_proj.weight", keys, (heads * width, hidden)))
        found.append((".self_attn.o_proj.weight", keys, (hidden, heads * width)))
        if key_heads := shape.get("num_key_value_heads"):
            keys = ("num_key_value_heads", "head_dim", "hidden_size")
            found += [(f".self_attn.{part}_proj.weight", keys, (key_heads * width, hidden)) for part in "kv"]
    return found


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
HEADS_SHARE_HIDDEN = ("llama", "mistral", "qwen2")
"""Types whose heads divide the hidden size where config.json names no `head_dim`."""
LIKE_LLAMA = (*HEADS_SHARE_HIDDEN, "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "smollm3", "olmo2", "granite")
"""Types whose layers have Llama's tensors, every layer alike."""


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
