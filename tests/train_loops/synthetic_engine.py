"""A tiny policy's microbatches, and some steps of an engine on them."""

from __future__ import annotations

import torch
from chained_samples import sample

from train_loops.config import OptimizerConfig
from train_loops.engine.deepspeed_engine import Engine
from train_loops.engine.logprobs import completion_logprobs
from train_loops.rows.batching import Batch, collate

OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5, warmup_steps=2)


def batches(num: int = 3) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 256, (12 + i,), generator=random).tolist() for i in range(2 * num)]
    samples = [sample(str(i), 0, row[:6], row[6:]) for i, row in enumerate(ids)]
    return [collate(samples, [(2 * i,), (2 * i + 1,)]) for i in range(num)]


def train(engine: Engine, num_steps: int) -> list[float]:
    norms = []
    for _ in range(num_steps):
        parts = batches()
        for i, batch in enumerate(parts):
            engine.backward(-completion_logprobs(engine, batch).sum() / 50, is_last=i == len(parts) - 1)
        norms.append(engine.step().grad_norm)
    return norms


def weights(engine: Engine) -> torch.Tensor:
    return torch.cat([x.flatten() for _, x in engine.tensors(engine.module)])
