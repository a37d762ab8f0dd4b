"""Untrained model folders in the shapes of published families: their layers, tokenizer and chat template, in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.small_tokenizers import build

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SHAPES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    # family: model_type, tokenizer, what its config says besides
    "gemma3": (
        "gemma3_text",
        "gemma",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
    ),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "qwen2.5": ("qwen2", "qwen", {"tie_word_embeddings": True, "sliding_window": 32, "use_sliding_window": False}),
    "qwen3": ("qwen3", "qwen", {"tie_word_embeddings": False}),
    "smollm2": ("llama", "qwen", {"tie_word_embeddings": True, "rope_theta": 100_000.0}),
}
WINDOWED = {"gemma3"}


def write_shape(family: str, folder: Path, *, dtype: str = "bfloat16", scale: float = 1.0) -> Path:
    """Writes a folder. Args: scale: of all weights but norms; above 1 the model is surer of its next token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, tokenizer, more = SHAPES[family]
    build(tokenizer, folder)
    config = AutoConfig.for_model(model_type, **SIZES, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(scale)
    generation = (folder / "generation_config.json").read_text()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    return folder
