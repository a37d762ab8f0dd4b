"""A tiny untrained policy of either architecture, built on the spot, that can be exact in float64."""

from __future__ import annotations

import torch
from torch import nn

from train_loops.config import TinyModelConfig
from train_loops.engine.logprobs import PolicyScorer
from train_loops.engine.tiny_model import build_model, build_tokenizer


def policy(architecture: str, dtype: torch.dtype, *, gradient_checkpointing: bool = False) -> PolicyScorer:
    """Two layers, grouped query attention; the same weights at every call."""
    shape = TinyModelConfig(
        architecture=architecture,  # type: ignore[arg-type]
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    model = build_model(shape, build_tokenizer(["some words"], vocab_size=400), seed=0)
    if dtype == torch.float64:
        keep_float64(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyScorer(model.to(dtype)).train()


def keep_float64(model: nn.Module) -> None:
    """Norms of Hugging Face models go through float32, whatever the model's type."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)
