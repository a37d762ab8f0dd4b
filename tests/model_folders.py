"""Model folders without a model: config, headers of safetensors files over zeros, a small tokenizer and its chat template."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers  # noqa: F401 - where it is there already, folders are checked in this process, which saves seconds each

from tests.small_tokenizers import build

SIZE_OF = {"F32": 4, "BF16": 2}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": None},
}
CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
}


def write_model(
    folder: Path, family: str = "qwen", *, shards: int = 1, dtype: str = "F32", tied: bool = True, **sizes: int
) -> Path:
    """Writes a whole folder of a family's shape. Args: sizes: values of config.json that are others."""
    build(family, folder)
    config = {**CONFIG, **SHAPES[family], **sizes, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config)
    names = sorted(tensors)
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors, dtype=dtype)
        return folder
    place_of = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(place_of.values()):
        own = {name: tensors[name] for name in names if place_of[name] == file}
        write_tensors(folder / file, own, dtype=dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place_of}))
    return folder


def tensors_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tensors of a decoder of one of `SHAPES`, by name."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": [heads * width, hidden],
            f"{at}.self_attn.k_proj.weight": [config["num_key_value_heads"] * width, hidden],
            f"{at}.self_attn.v_proj.weight": [config["num_key_value_heads"] * width, hidden],
            f"{at}.self_attn.o_proj.weight": [hidden, heads * width],
            f"{at}.mlp.gate_proj.weight": [inner, hidden],
            f"{at}.mlp.up_proj.weight": [inner, hidden],
            f"{at}.mlp.down_proj.weight": [hidden, inner],
            **{f"{at}.{norm}.weight": [hidden] for norm in norms},
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"{at}.self_attn.{part}_norm.weight": [width] for part in "qk"}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [config["vocab_size"], hidden]
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Sequence[int]], *, dtype: str = "F32") -> None:
    """Writes zeros of these shapes as one safetensors file."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = SIZE_OF[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def change_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of None removes its key."""
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
