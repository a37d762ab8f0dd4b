"""parts: what is checked -> the run that checks it: settings of engines and trainers over one small loop.

| part | GPUs | engines | trainer |
|---|---|---|---|
| shared | 1 | bfloat16, asleep while the trainer has the GPU | bfloat16, ZeRO-2, its states in the host's memory afterwards |
| zero-3 | 1 | the same | bfloat16, ZeRO-3, loaded again for each job |
| adapters | 1 | one base in bfloat16, two LoRA adapters | bfloat16, ZeRO-2, adapters only |
| shared-two | 2 | two, each asleep while a trainer's worker has its GPU | bfloat16, ZeRO-3 over the two GPUs |
| separate | 2 | bfloat16, a GPU of its own | bfloat16, ZeRO-2, a GPU of its own |
| two-workers | 3 | the same | bfloat16, ZeRO-3 over two GPUs (NCCL) |
| tensor-parallel | 2 | bfloat16, split over two GPUs | float32, on the CPU |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AGENTS = ("solver", "verifier", "refiner", "finalizer")
SHARED = {"pool": "shared", "serve.gpus": 0.5, "train.gpus_per_worker": 0.5}
ZERO_2 = {"train.deepspeed": {"bf16": True, "zero_stage": 2}}
ZERO_3 = {"train.deepspeed": {"bf16": True, "zero_stage": 3}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the check."""

    num_gpus: int
    """How many GPUs it needs."""
    settings: Mapping[str, Any]
    """Dotted keys of a run config."""
    has_adapters: bool = False


PARTS: Mapping[str, Part] = {
    "shared": Part(num_gpus=1, settings=SHARED | ZERO_2),
    "zero-3": Part(num_gpus=1, settings=SHARED | ZERO_3),
    "adapters": Part(
        num_gpus=1,
        settings=SHARED
        | ZERO_2
        | {"train.lora": {"rank": 8}, "train.gpus_per_worker": 0.25},  # two trainers, one engine
        has_adapters=True,
    ),
    "shared-two": Part(
        num_gpus=2,
        settings={"pool": "shared", "serve.gpus": 0.6, "serve.num_replicas": 2}
        | {"train.gpus_per_worker": 0.4, "train.num_workers": 2}
        | ZERO_3,
    ),
    "separate": Part(num_gpus=2, settings={"serve.gpus": 1, "train.gpus_per_worker": 1} | ZERO_2),
    "two-workers": Part(
        num_gpus=3, settings={"serve.gpus": 1, "train.gpus_per_worker": 1, "train.num_workers": 2} | ZERO_3
    ),
    "tensor-parallel": Part(num_gpus=2, settings={"serve.gpus": 2, "serve.tensor_parallel_size": 2}),
}


def changes_of(part: Part, *, model: str, on_gpu: bool, num_cores: int) -> dict[str, Any]:
    """Returns the changes of the demo's config that make the run of a part.

    Args:
        model: a model's folder; empty: a tiny one is made.
        on_gpu: False rehearses the part on the CPU: no GPU is reserved, and engines compute in float32.
        num_cores: of this machine.
    """
    changes: dict[str, Any] = {
        "iterations": 2,
        # Every row has a gradient, whatever an untrained model writes.
        "credit": {"path": "tests.bench.credit:LetterShare"},
        "collect": {"tasks_per_iteration": 16 if on_gpu else 4, "episodes_per_task": 8},
        "train.optimizer": {"lr": 1e-4 if part.has_adapters else 1e-5, "max_grad_norm": 1.0},
        "train.threads": max(1, num_cores // 2),
        "train.num_minibatches": 2,
        # What bfloat16 differs by is what is to be found out: it is shown, and fails only where it is large.
        "train.mismatch": {"limit_mean": 0.5},
        "serve": {"max_model_len": 256, "max_num_seqs": 128, "kv_cache_gib": 0.25},
        **part.settings,
    }
    agents = {"all": AGENTS} if not part.has_adapters else {"first": AGENTS[:2], "second": AGENTS[2:]}
    changes["model_groups"] = {
        group: {"agents": list(own)}
        | ({"model": model} if model else {})
        | ({"base": "base"} if part.has_adapters else {})
        for group, own in agents.items()
    }
    if model:
        changes["warmstart"] = None
    else:
        changes |= {"warmstart.num_demonstrations": 64, "warmstart.num_epochs": 1}
    if on_gpu:
        # Half of the GPU even where the engine shares it: the models are small, and others may be on the machine.
        return changes | {"serve.dtype": "bfloat16", "serve.engine": {"gpu_memory_utilization": 0.5}}
    return changes | {
        "serve.gpus": 0,
        "serve.tensor_parallel_size": 1,
        "train.gpus_per_worker": 0,
        "train.num_workers": 1,
    }


def left_out(part: Part, num_gpus: int) -> str:
    """Returns why a part cannot be checked on so many GPUs; empty where it can."""
    if num_gpus >= part.num_gpus:
        return ""
    return f"needs {part.num_gpus} GPUs, there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
