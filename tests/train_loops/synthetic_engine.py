"""A tiny policy's microbatches, and some steps of an engine on them."""

from __future__ import annotations

import torch

from train_loops.config import OptimizerConfig
from train_loops.engine.deepspeed_engine import Engine
from train_loops.engine.logprobs import completion_logprobs
from train_loops.rows.batching import Batch, collate
from train_loops.rows.samples import Sample

OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5, warmup_steps=2)


def batches(num: int = 3) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    samples = [
        Sample(
            episode_id=str(i),
            group_id="g",
            task_id="t",
            agent="a",
            turn_index=0,
            round_index=0,
            episode_round=0,
            token_ids=torch.randint(0, 256, (12 + i,), generator=random).tolist(),
            prompt_length=6,
            rollout_logprobs=[0.0] * (6 + i),
            reward=0.0,
            temperature=1.0,
            max_tokens=16,
            status="ok",
        )
        for i in range(2 * num)
    ]
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
