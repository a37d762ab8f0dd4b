"""engine: a model and its settings -> a DeepSpeed engine that trains, checkpoints and exports it.

    load_policy / load_critic --Engine--> forward, backward (any number of microbatches), step, save, load
                                  └──export_weights──> folder in Hugging Face layout

ZeRO 0 to 3, float32 or bf16, on CPU (gloo) or GPU (NCCL). Nothing here is ever compiled.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stores.manifest import read_safetensors_header
from train_loops.config import DeepSpeedConfig, OptimizerConfig

if TYPE_CHECKING:
    from train_loops.critic import ValueModel
    from train_loops.logprobs import PolicyScorer

WEIGHTS_FILE = "model.safetensors"
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "manifest.json", "train_result.json")
"""Of the parent's folder: what a new version does not inherit."""
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping, over all workers; not finite where the step was skipped."""
    is_applied: bool


def join_workers() -> None:
    """Makes DeepSpeed use the process group of this process, or one of a single worker where there is none.

    DeepSpeed would compile shared-memory collectives for CPU workers; that is switched off: one worker needs none, a
    machine that serves may have no compiler, and gloo is right for the rest.
    """
    import torch.distributed as dist

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), dist_init_required=False)


def device() -> torch.device:
    """Where this worker's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_policy(folder: str | Path, config: DeepSpeedConfig) -> PolicyScorer:
    """The policy in `folder` (Hugging Face layout), ready for an `Engine`."""
    from train_loops.logprobs import PolicyScorer

    return PolicyScorer(load_model(folder, config))


def load_model(folder: str | Path, config: DeepSpeedConfig) -> Any:
    """The causal language model in `folder`, as a policy is trained from it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(config), attn_implementation="sdpa")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_critic(folder: str | Path, config: DeepSpeedConfig) -> ValueModel:
    """A fresh critic on the trunk of the policy in `folder`."""
    from train_loops.critic import ValueModel

    model = ValueModel.from_policy(folder, dtype=_dtype(config))
    if config.gradient_checkpointing:
        model.trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_reference(folder: str | Path, config: DeepSpeedConfig) -> nn.Module:
    """The policy in `folder`, frozen: see `freeze`."""
    return freeze(load_policy(folder, config), config)


def freeze(module: nn.Module, config: DeepSpeedConfig) -> nn.Module:
    """A module that is called without gradients only. Under ZeRO-3 partitioned like the others."""
    module = module.eval().requires_grad_(False).to(device())
    if config.zero_stage < 3:
        return module
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
    settings |= {"bf16": {"enabled": config.bf16}}
    return deepspeed.initialize(model=module, config=settings, dist_init_required=False)[0]


class Engine:
    """One model under DeepSpeed. Called like the module it wraps.

    A minibatch is any number of `backward` calls, the last one with `is_last=True`, then `step`. Gradients of the
    microbatches add up, gradients of the workers are averaged.
    """

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig, config: DeepSpeedConfig) -> None:
        """Args: module: float32 or, for bf16, bfloat16; it belongs to the engine from now on."""
        import deepspeed

        self._settings = optimizer
        # bf16 weights need float32 masters, which DeepSpeed keeps in its ZeRO optimizers.
        self._stage = max(config.zero_stage, 1) if config.bf16 else config.zero_stage
        self.num_steps = 0
        self._is_whole = all(parameter.requires_grad for parameter in module.parameters())
        """False for an adapter: its checkpoints leave the frozen base out."""
        self._deepspeed, self._optimizer, _, _ = deepspeed.initialize(
            model=module.to(device()),
            optimizer=torch.optim.AdamW(
                [parameter for parameter in module.parameters() if parameter.requires_grad],
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                fused=True,
            ),
            config=_deepspeed_config(config, stage=self._stage, max_grad_norm=optimizer.max_grad_norm),
            dist_init_required=False,
        )

    @property
    def module(self) -> nn.Module:
        """What was given; under ZeRO-3 its parameters are partitioned (read them with `tensors`)."""
        return self._deepspeed.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self._deepspeed(*args, **kwargs)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients, no dropout."""
        self._deepspeed.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._deepspeed.train()

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds the gradients of a microbatch's share of the loss.

        Args:
            loss: scalar. Where it is not finite all gradients become NaN, so that `step` skips on every worker.
            is_last: True for the last microbatch of the minibatch.
        """
        guard = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        self._deepspeed.backward(loss * guard, scale_wrt_gas=False)

    def step(self) -> Step:
        """Clips and applies the gradients; skips the step, gradients dropped, where their norm is not finite."""
        settings = self._settings
        factor = min(1.0, (self.num_steps + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group.update(lr=settings.lr * factor, betas=settings.betas, eps=settings.eps)
            group["weight_decay"] = settings.weight_decay
        if self._stage == 0:
            norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), settings.max_grad_norm))
            if math.isfinite(norm):
                self._deepspeed.step()
            else:
                self._deepspeed.zero_grad()
            is_applied = math.isfinite(norm)
        else:
            self._deepspeed.step()
            norm = float(self._deepspeed.get_global_grad_norm())
            is_applied = self._deepspeed.was_step_applied()
        self.num_steps += is_applied
        return Step(grad_norm=norm, is_applied=is_applied)

    def save(self, folder: str | Path, *, tag: str, state: Mapping[str, Any]) -> None:
        """Writes weights, optimizer and `state` (JSON values); all workers call it, each may have its own folder."""
        self._deepspeed.save_checkpoint(
            str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=not self._is_whole
        )
        about = {"state": dict(state), "num_steps": self.num_steps, "layout": self._layout()}
        (Path(folder) / f"{tag}.json").write_text(json.dumps(about))

    def fits(self, folder: str | Path, *, tag: str) -> bool:
        """Whether `load` would find a checkpoint of this number of workers and ZeRO stage."""
        path = Path(folder) / f"{tag}.json"
        return path.is_file() and json.loads(path.read_text())["layout"] == self._layout()

    def load(self, folder: str | Path, *, tag: str) -> dict[str, Any]:
        """Restores what `save` wrote and returns its `state`.

        Raises ValueError where it is missing, or was written by another number of workers or another ZeRO stage.
        """
        path = Path(folder) / f"{tag}.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no checkpoint of {tag!r}")
        about = json.loads(path.read_text())
        if about["layout"] != self._layout():
            raise ValueError(
                f"checkpoint {path} was written with {about['layout']}, this is {self._layout()}: train with the old "
                "number of workers and ZeRO stage, or from the weights alone"
            )
        self._deepspeed.load_checkpoint(str(folder), tag=tag, load_module_strict=self._is_whole)
        self.num_steps = about["num_steps"]
        return about["state"]

    def tensors(self, module: nn.Module, *, only_trainable: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of `module` (a part of this engine's) on the CPU, whole, one after the other.

        Tied parameters come once. All workers iterate.
        """
        import deepspeed

        for name, parameter in module.named_parameters():
            if only_trainable and not parameter.requires_grad:
                continue
            if self._stage < 3:
                yield name, parameter.detach().to("cpu", copy=True)
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().to("cpu", copy=True)
            yield name, whole

    def close(self) -> None:
        """Lets go of hooks and memory."""
        self._deepspeed.destroy()

    def _layout(self) -> dict[str, int]:
        return {"zero_stage": self._stage, "num_workers": torch.distributed.get_world_size()}


def export_weights(engine: Engine, *, parent: str | Path, out: str | Path) -> Path:
    """Writes a `PolicyScorer` engine's model as a Hugging Face folder; all workers call it, worker 0 writes.

    Names, dtypes and tying are the parent's, so that a running engine can load one over the other: a tied head that the
    parent's file stores all the same is stored again. Config and tokenizer files are copied from it.

    Args:
        engine: around a `PolicyScorer`.
        parent: folder of the version that was trained from.
        out: folder to write.

    Raises:
        ValueError: the parent's folder does not hold the same tensors.
    """
    from safetensors.torch import save_file

    parent, out = Path(parent), Path(out)
    dtypes: dict[str, str] = {}
    for file in sorted(parent.glob("*.safetensors")):
        dtypes |= {name: dtype for name, (dtype, _) in read_safetensors_header(file).items()}
    is_writer = torch.distributed.get_rank() == 0
    tensors = {}
    for name, tensor in engine.tensors(engine.module.model):  # type: ignore[arg-type]
        if not is_writer:
            continue
        if name not in dtypes:
            raise ValueError(f"{parent} has no tensor {name!r}, the model trained from it does")
        tensors[name] = tensor.to(SAFETENSORS_DTYPES[dtypes[name]]).contiguous()
    for name, source in _tied_names(engine.module.model).items():  # type: ignore[arg-type]
        if is_writer and name in dtypes:
            tensors[name] = tensors[source].to(SAFETENSORS_DTYPES[dtypes[name]], copy=True)
    if is_writer:
        shutil.copytree(parent, out, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    return out


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Further name of a parameter -> the name that `Engine.tensors` gives it."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}


def _dtype(config: DeepSpeedConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32


def _deepspeed_config(config: DeepSpeedConfig, *, stage: int, max_grad_norm: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # At stage 0 in float32 DeepSpeed clips without telling the norm: `Engine.step` clips there.
        "gradient_clipping": max_grad_norm if stage else 0.0,
        "bf16": {"enabled": config.bf16},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
