"""models: a model version -> the engines that a job trains, and the models that it compares with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stores.types import ModelVersionRef
from stores.weights.manifest import whole_model
from stores.weights.store import WeightStore
from train_loops.config import TrainConfig
from train_loops.engine.adapters import load_reference_of, load_version
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, load_critic, load_reference, move
from train_loops.rows.batching import device


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of one model group in memory."""

    policy: Engine
    critic: Engine | None = None
    """Of ppo and ippo, unless it is a head on the policy's trunk."""
    reference: Callable[..., Any] | None = None
    """A frozen `PolicyScorer`, where a KL coefficient is set."""
    shares_trunk: bool = False
    """Whether the policy's `PolicyScorer` has a value head (`critic.kind: shared`)."""

    @property
    def has_values(self) -> bool:
        """Says whether there is a critic of any kind."""
        return self.critic is not None or self.shares_trunk

    def offload(self) -> bool:
        """Moves all models into the host's memory until `reload`; False where one cannot be moved: see `Engine.offload`."""
        if not all(engine.offload() for engine in (self.policy, self.critic) if engine is not None):
            return False
        if isinstance(self.reference, nn.Module):  # else it is the policy's base, which has moved with it
            move(self.reference, torch.device("cpu"))
        return True

    def reload(self) -> None:
        """Moves back what `offload` moved."""
        for engine in (self.policy, self.critic):
            if engine is not None:
                engine.reload()
        if isinstance(self.reference, nn.Module):
            move(self.reference, device())

    def close(self) -> None:
        """Releases hooks and memory."""
        self.policy.close()
        if self.critic is not None:
            self.critic.close()
        destroy = getattr(self.reference, "destroy", None)  # under ZeRO-3 it is a DeepSpeed engine, too
        if destroy is not None:
            destroy()


def build_models(store: WeightStore, parent: ModelVersionRef, config: TrainConfig) -> Models:
    """Builds the models that `config` asks for with the weights of `parent`; optimizers and critic are fresh.

    Raises ValueError where a KL coefficient is set and version 0 of the model group, the reference, is gone.
    """
    settings = config.deepspeed
    module = load_version(store, parent, settings, config.lora)
    shares_trunk = config.has_critic and config.critic.kind == "shared"
    if shares_trunk:
        dtype = next(module.model.parameters()).dtype
        width = module.model.config.get_text_config().hidden_size
        module.value_head = value_head(width, hidden_size=config.critic.hidden_size, dtype=dtype)
    policy = Engine(module, optimizer=config.optimizer, config=settings)
    critic = None
    if config.has_critic and not shares_trunk:
        # Features are the same in every iteration where the trunk is frozen: they are version 0's.
        trunk = _version_0(store, parent.model_group) if config.critic.kind == "frozen" else parent
        folder = store.fetch(whole_model(trunk))
        critic = Engine(
            load_critic(folder, settings, config.critic), optimizer=config.critic.optimizer, config=settings
        )
    return Models(
        policy=policy, critic=critic, reference=_reference(store, parent, policy, config), shares_trunk=shares_trunk
    )


def _reference(store: WeightStore, parent: ModelVersionRef, policy: Engine, config: TrainConfig) -> Any:
    """Returns version 0 of the model group, frozen; None where no KL coefficient is set."""
    if config.loss.kl_in_loss_coef == 0 and config.loss.kl_in_reward_coef == 0:
        return None
    ref = _version_0(store, parent.model_group)
    if store.manifest(ref).base is not None:
        return load_reference_of(policy, store, ref, config.deepspeed)
    return load_reference(store.fetch(ref), config.deepspeed)


def _version_0(store: WeightStore, model_group: str) -> ModelVersionRef:
    ref = store.ref(model_group, 0)
    if ref is None:
        raise ValueError(
            f"{store.uri_of(model_group, 0)} does not exist: version 0 of the model group is the reference of a KL term "
            "and the trunk of a frozen critic"
        )
    return ref
