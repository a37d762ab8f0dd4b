"""engine: a model and its settings -> a DeepSpeed engine that trains and checkpoints it.

    load_policy / load_critic --Engine--> forward, backward (any number of microbatches), step, save, load

ZeRO (arXiv 1910.02054) 0 to 3, float32 or bf16, on CPU (gloo) or GPU (NCCL). Nothing is ever compiled, so that machines
without a compiler can train.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stores.weights.model_folder import num_known_rows
from train_loops.config import CriticConfig, DeepSpeedConfig, OptimizerConfig
from train_loops.engine.checkpoints import Partitions, fits, load_checkpoint, save_checkpoint
from train_loops.rows.batching import device
from train_loops.signal.learning_rate import adamw, learning_rate

if TYPE_CHECKING:
    from train_loops.engine.critic import ValueModel
    from train_loops.engine.logprobs import PolicyScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping, over all workers; not finite where the step was skipped."""
    is_applied: bool


def join_workers() -> None:
    """Makes DeepSpeed use the process group of this process, or one of a single worker where there is none.

    DeepSpeed would compile shared-memory collectives for CPU workers. That is switched off: one worker needs none, a
    machine that serves may have no compiler, and gloo serves the others.
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


def load_policy(folder: str | Path, config: DeepSpeedConfig) -> PolicyScorer:
    """Loads the policy in `folder` (Hugging Face layout), ready for an `Engine`."""
    from train_loops.engine.logprobs import PolicyScorer

    return PolicyScorer(load_model(folder, config), num_known=num_known_rows(Path(folder)))


def load_model(folder: str | Path, config: DeepSpeedConfig) -> Any:
    """Loads the causal language model in `folder`, as a policy is trained from it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=_dtype(config), attn_implementation="sdpa", trust_remote_code=False
    )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_critic(folder: str | Path, config: DeepSpeedConfig, critic: CriticConfig | None = None) -> ValueModel:
    """Builds a fresh critic on the trunk of the policy in `folder`, which is frozen where `critic.kind` says so."""
    from train_loops.engine.critic import ValueModel

    critic = critic or CriticConfig()
    is_frozen = critic.kind == "frozen"
    model = ValueModel.from_policy(folder, dtype=_dtype(config), hidden_size=critic.hidden_size, is_frozen=is_frozen)
    if config.gradient_checkpointing and not is_frozen:
        model.trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_reference(folder: str | Path, config: DeepSpeedConfig) -> nn.Module:
    """Loads the policy in `folder`, frozen: see `freeze`."""
    return freeze(load_policy(folder, config), config)


def freeze(module: nn.Module, config: DeepSpeedConfig) -> nn.Module:
    """Prepares a module that is called without gradients only; under ZeRO-3 it is partitioned like the others."""
    module = module.eval().requires_grad_(False).to(device())
    if config.zero_stage < 3:
        return module
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
    settings |= {"bf16": {"enabled": config.bf16}}
    return deepspeed.initialize(model=module, config=settings, dist_init_required=False)[0]


class Engine:
    """One model under DeepSpeed. Called like the module it wraps, which stays in evaluation mode while it trains.

    Dropout, and whatever else a model does at random in training mode, would make the network of the update another one than the network whose
    tokens are scored before it: the ratio of the two would no longer be 1 where no weight has changed.

    A minibatch is any number of `backward` calls, the last one with `is_last=True`, then `step`. Gradients of the
    microbatches add up, gradients of the workers are averaged.
    """

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig, config: DeepSpeedConfig) -> None:
        """Args: module: float32 or, for bf16, bfloat16; it belongs to the engine from now on."""
        import deepspeed

        self._settings = optimizer
        # bf16 weights need float32 masters and sums of gradients, which DeepSpeed keeps in its ZeRO optimizers; that of stage 1
        # cannot leave the GPU (`offload`).
        self._stage = max(config.zero_stage, 2) if config.bf16 else config.zero_stage
        self.num_steps = 0
        self._deepspeed, self._optimizer, _, _ = deepspeed.initialize(
            model=module.to(device()),
            optimizer=adamw([p for p in module.parameters() if p.requires_grad], optimizer, fused=True),
            config=_deepspeed_config(config, stage=self._stage, max_grad_norm=optimizer.max_grad_norm),
            dist_init_required=False,
        )
        self._deepspeed.eval()
        _keep_recomputing(module)

    @property
    def module(self) -> nn.Module:
        """Returns the wrapped module; under ZeRO-3 its parameters are partitioned (read them with `tensors`)."""
        return self._deepspeed.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass."""
        return self._deepspeed(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds the gradients of a microbatch's share of the loss.

        Args:
            loss: scalar. Where it is not finite all gradients become NaN, so that `step` skips on every worker.
            is_last: True for the last microbatch of the minibatch.
        """
        # A loss of infinity may have finite gradients on this worker; times NaN none is, and after the workers' gradients
        # are averaged none is anywhere: all workers skip together, and stay in step.
        guard = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        self._deepspeed.backward(loss * guard, scale_wrt_gas=False)

    def step(self, *, with_decay: bool = True) -> Step:
        """Clips and applies the gradients; skips the step, gradients dropped, where their norm is not finite.

        Args:
            with_decay: False: no weight decay, so that parameters whose gradients were always zero do not change.
        """
        settings = self._settings
        for group in self._optimizer.param_groups:
            group.update(lr=learning_rate(settings, self.num_steps), betas=settings.betas, eps=settings.eps)
            group["weight_decay"] = settings.weight_decay if with_decay else 0.0
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

    def save(self, folder: str | Path, *, tag: str, state: Mapping[str, Any], but: str = "") -> None:
        """Writes trainable weights, optimizer and `state` (JSON values); all workers call it, worker 0 writes.

        Args: but: weights of parameters whose names begin so are left out: see `save_checkpoint`.
        """
        save_checkpoint(self._partitions, folder, tag=tag, state=state, num_steps=self.num_steps, but=but)

    def fits(self, folder: str | Path, *, tag: str) -> bool:
        """Says whether `load` would find a checkpoint of these parameters, of any ZeRO stage and number of workers."""
        return fits(self._partitions, folder, tag=tag)

    def load(self, folder: str | Path, *, tag: str) -> dict[str, Any]:
        """Restores what `save` wrote and returns its `state`; ValueError where it is missing or of another model."""
        state, self.num_steps = load_checkpoint(self._partitions, folder, tag=tag)
        return state

    def tensors(
        self, module: nn.Module, *, only_trainable: bool = False, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters of `module` (a part of this engine's) on the CPU, whole, one after the other.

        All workers iterate to the end, because gathering a parameter is a collective.

        Args:
            only_trainable: leave frozen parameters out.
            names: yield these, a tied parameter under each of its names that is among them; None: all, tied ones once.
        """
        import deepspeed

        for name, parameter in module.named_parameters(remove_duplicate=names is None):
            if (only_trainable and not parameter.requires_grad) or (names is not None and name not in names):
                continue
            if self._stage < 3:
                yield name, parameter.detach().to("cpu", copy=True)
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().to("cpu", copy=True)
            yield name, whole

    def offload(self) -> bool:
        """Moves everything that lies on the GPU into the host's memory; `reload` undoes it, nothing else may come between.

        Returns False, with nothing moved, under ZeRO-3: DeepSpeed offloads the states of its own FusedAdam only there.
        """
        if self._stage >= 3:
            return False
        if self._stage > 0:
            self._deepspeed.offload_states(pin_memory=False)
        else:
            _move_states(self._optimizer, torch.device("cpu"))
        # What the optimizer does not hold: frozen weights, buffers, all at stage 0.
        move(self.module, torch.device("cpu"))
        return True

    def reload(self) -> None:
        """Moves back what `offload` moved."""
        if self._stage > 0:
            self._deepspeed.reload_states()
        else:
            _move_states(self._optimizer, device())
        move(self.module, device())

    def close(self) -> None:
        """Releases hooks and memory."""
        self._deepspeed.destroy()

    @property
    def _partitions(self) -> Partitions:
        return Partitions(self.module, self._optimizer, stage=self._stage)


def _keep_recomputing(module: nn.Module) -> None:
    """Makes the layers with gradient checkpointing recompute in backward though the module is in evaluation mode.

    transformers asks whether a layer is in training mode: it is, except while it computes.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training = True
            layer._gradient_checkpointing_func = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, call: Callable[..., Any], *inputs: Any) -> Any:
    def computed(*again: Any) -> Any:
        layer.training = False
        try:
            return call(*again)
        finally:
            layer.training = True

    return checkpoint(computed, *inputs, use_reentrant=False)


def move(module: nn.Module, to: torch.device) -> None:
    """Moves parameters and buffers in place: whoever holds one of them sees it move. Tied ones stay tied."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != to.type:
            tensor.data = tensor.data.to(to)


def _move_states(optimizer: Any, to: torch.device) -> None:
    """Moves the states of a plain PyTorch optimizer."""
    for states in optimizer.state.values():
        for name, value in states.items():
            if torch.is_tensor(value):
                states[name] = value.to(to)


def _dtype(config: DeepSpeedConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32


def _deepspeed_config(config: DeepSpeedConfig, *, stage: int, max_grad_norm: float) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # At stage 0 in float32 DeepSpeed clips but does not return the norm, so `Engine.step` clips there itself.
        "gradient_clipping": max_grad_norm if stage else 0.0,
        "bf16": {"enabled": config.bf16},
        # In bf16 the gradient of a late microbatch is lost where the sum so far is 256 times as large.
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
