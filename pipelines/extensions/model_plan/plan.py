"""plan: a run config and its model folders -> dtypes, bytes on disk and memory, in one line per model group.

Reads the headers of the safetensors files; no torch. Memory is an estimate: weights, gradients, moments, activations and what an
empty process of each kind takes. It is compared with the machine where everything runs on its CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil

from pipelines.config.run_config import RunConfig
from stores.resources import memory_limit
from stores.weights.manifest import stored_dtype
from stores.weights.model_folder import Tensors, read_config, read_tensors
from train_loops.config import DeepSpeedConfig, TrainConfig
from train_loops.engine.state_sizes import MOMENTS_BYTES, checkpoint_bytes, version_bytes

SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
ENGINE_GIB, TRAINER_GIB = 1.5, 0.9
"""What a process takes before it holds a model."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What the models of one model group need."""

    num_parameters: int
    num_trained: int
    folder_dtype: str
    trainer_dtype: str
    engine_dtype: str
    version_bytes: int
    checkpoint_bytes: int
    engine_bytes: int
    """Memory of all engines; 0 for a further adapter of a base that another group has named."""
    trainer_bytes: int
    """Memory of all workers."""

    def line(self, group: str) -> str:
        """Returns it in words."""
        trained = "" if self.num_trained == self.num_parameters else f" ({_count(self.num_trained)} trained)"
        engines = f"engines about {_gib(self.engine_bytes)}" if self.engine_bytes else "engines shared with its base"
        return (
            f"model_groups.{group}: {_count(self.num_parameters)} parameters{trained}; folder {self.folder_dtype}, trainer "
            f"{self.trainer_dtype}, engine {self.engine_dtype}; {_size(self.version_bytes)} per version, "
            f"{_size(self.checkpoint_bytes)} per checkpoint; memory: {engines}, trainer about {_gib(self.trainer_bytes)}"
        )


def notes(config: RunConfig) -> list[str]:
    """Returns a line per model group whose folder is on this machine, and one on memory."""
    folders = {group: settings.model for group, settings in config.model_groups.items() if settings.model}
    here = {group: Path(folder) for group, folder in folders.items() if "://" not in folder}
    return plan_lines(config, {group: (_text_shape(folder), read_tensors(folder)) for group, folder in here.items()})


def _text_shape(folder: Path) -> dict[str, Any]:
    shape = read_config(folder)
    return shape | (shape.get("text_config") or {})


def plan_lines(config: RunConfig, models: Mapping[str, tuple[dict[str, Any], Tensors]]) -> list[str]:
    """Returns the lines. Args: models: config.json (of the text model) and tensors by model group, as far as they are here."""
    plans: dict[str, ModelPlan] = {}
    seen: set[str] = set()
    for group, (shape, tensors) in models.items():
        weights = config.weights_name(group)
        plans[group] = plan(config, group, shape, tensors, has_engine=weights not in seen)
        seen.add(weights)
    lines = [plan.line(group) for group, plan in plans.items()]
    lines += [
        f"model_groups.{group}: the engine rounds float32 weights to {plan.engine_dtype} (serve.dtype), and loses steps smaller than that: "
        "train in bfloat16, too (train.deepspeed.bf16), or leave serve.dtype at auto"
        for group, plan in plans.items()
        if plan.trainer_dtype == "float32" != plan.engine_dtype and config.train_config(group).lora is None
    ]
    on_cpu = all(
        config.serve_config(group).gpus == 0 and config.train_config(group).gpus_per_worker == 0
        for group in config.model_groups
    )
    if len(plans) < len(config.model_groups) or not on_cpu:
        return lines
    needed, has = sum(p.engine_bytes + p.trainer_bytes for p in plans.values()), memory_bytes()
    line = f"memory: engines and trainers take about {_gib(needed)}, this machine has {_gib(has)}"
    if needed > has:
        line += (
            ", too little: lower serve.kv_cache_gib, train.microbatch_tokens or the number of replicas and workers, set "
            "train.deepspeed.gradient_checkpointing, or train adapters (train.lora)"
        )
    return [*lines, line]


def plan(
    config: RunConfig, group: str, shape: Mapping[str, Any], tensors: Tensors, *, has_engine: bool = True
) -> ModelPlan:
    """Returns what a model group needs. Args: has_engine: False where another group's engines serve its base already."""
    train, serve = config.train_config(group), config.serve_config(group)
    stored = stored_dtype(tensors)
    trainer = "bfloat16" if train.deepspeed.bf16 else "float32"
    engine = stored if serve.dtype == "auto" else serve.dtype
    num_parameters = _num_parameters(shape, tensors)
    num_trained = num_parameters if train.lora is None else _num_in_adapter(train, tensors)
    version = version_bytes(train, num_trained)
    weights = num_parameters * SIZE_OF.get(engine, 4)
    # While weights are swapped an engine holds the new ones beside the old.
    one_engine = weights + version + int((ENGINE_GIB + serve.kv_cache_gib * (serve.gpus == 0)) * GIB)
    own_critic = num_parameters if train.has_critic and train.critic.kind == "own" else 0
    return ModelPlan(
        num_parameters=num_parameters,
        num_trained=num_trained,
        folder_dtype=stored,
        trainer_dtype=trainer,
        engine_dtype=engine,
        version_bytes=version,
        checkpoint_bytes=checkpoint_bytes(train, num_trained, own_critic),
        engine_bytes=one_engine * serve.num_replicas if has_engine else 0,
        trainer_bytes=_trainer_bytes(train, shape, num_parameters, num_trained, own_critic),
    )


def _trainer_bytes(
    train: TrainConfig, shape: Mapping[str, Any], num_parameters: int, num_trained: int, own_critic: int
) -> int:
    size, workers = (2 if train.deepspeed.bf16 else 4), train.num_workers
    has_kl = train.loss.has_kl
    frozen = num_parameters - num_trained if train.lora is not None else 0
    frozen += num_parameters * (has_kl and train.lora is None)
    frozen += num_parameters * (train.has_critic and train.critic.kind == "frozen")
    learning = _learning_bytes(train.deepspeed, workers) * (num_trained + own_critic)
    layers, hidden = int(shape.get("num_hidden_layers") or 0), int(shape.get("hidden_size") or 0)
    inner = int(shape.get("intermediate_size") or 4 * hidden)
    per_layer = hidden if train.deepspeed.gradient_checkpointing else 10 * hidden + 4 * inner
    activations = train.microbatch_tokens // train.deepspeed.sequence_parallel * layers * per_layer * size
    parts = 1 if train.deepspeed.zero_stage == 3 else workers
    return int(frozen * size * parts + learning + (activations + TRAINER_GIB * GIB) * workers)


def _learning_bytes(config: DeepSpeedConfig, workers: int) -> int:
    """Bytes per trained number over all workers: weights, gradients, moments, and float32 masters where ZeRO keeps them.

    Stage 1 partitions masters and moments, stage 2 gradients, too, and stage 3 weights, too (arXiv 1910.02054).
    """
    size = 2 if config.bf16 else 4
    stage = max(config.zero_stage, 2) if config.bf16 else config.zero_stage  # as `deepspeed_engine.Engine` has it
    masters = 4 if stage else 0
    weights, gradients = size * (1 if stage == 3 else workers), 4 * (1 if stage >= 2 else workers)
    return weights + gradients + (masters + MOMENTS_BYTES) * (1 if stage else workers)


def _num_parameters(shape: Mapping[str, Any], tensors: Tensors) -> int:
    """Numbers in the weights; a head that is stored beside the embeddings that it is tied to does not count."""
    names = [n for n in tensors if not (shape.get("tie_word_embeddings") and n.endswith("lm_head.weight"))]
    return sum(prod(tensors[name][1]) for name in names)


def _num_in_adapter(train: TrainConfig, tensors: Tensors) -> int:
    assert train.lora is not None
    ends = tuple(f".{target}.weight" for target in train.lora.target_modules)
    return sum(train.lora.rank * sum(shape) for name, (_, shape) in tensors.items() if name.endswith(ends))


def memory_bytes() -> int:
    """Returns the memory of this machine, or what its container may take if that is less."""
    total, limit = psutil.virtual_memory().total, memory_limit()
    return total if limit is None else min(total, limit)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
