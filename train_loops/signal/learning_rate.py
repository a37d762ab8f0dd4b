"""learning_rate: the settings of an optimizer -> AdamW, and the rate of its next step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from train_loops.config import OptimizerConfig


def learning_rate(settings: OptimizerConfig, num_steps: int) -> float:
    """Returns the rate of step `num_steps` (from 0): linear warm-up, then constant, or falling until `decay_steps`.

    linear   lr (1 - (1 - min) t)
    cosine   lr (min + (1 - min) (1 + cos(pi t)) / 2)                     (SGDR, arXiv 1608.03983)
    t = (num_steps - warmup_steps) / (decay_steps - warmup_steps), at most 1;   min = `min_lr_share`
    """
    if num_steps < settings.warmup_steps:
        return settings.lr * (num_steps + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    least = settings.min_lr_share
    t = min(1.0, (num_steps - settings.warmup_steps) / (settings.decay_steps - settings.warmup_steps))
    share = 1 - t if settings.schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    return settings.lr * (least + (1 - least) * share)


def adamw(parameters: Iterable[torch.nn.Parameter], settings: OptimizerConfig, **more: Any) -> torch.optim.AdamW:
    """Returns AdamW as the settings say, at the rate after the warm-up."""
    own: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    return torch.optim.AdamW(parameters, **own | {"weight_decay": settings.weight_decay} | more)
