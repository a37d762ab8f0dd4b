"""models: a model version -> the engines that a job trains, and the models that it compares with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stores.types import ModelVersionRef
from stores.weights.manifest import Manifest, whole_model
from stores.weights.store import WeightStore
from train_loops.config import TrainConfig
from train_loops.engine.adapters import load_reference_of, load_version
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, load_critic, load_reference, move
from train_loops.rows.batching import device


@dataclass(slots=True, kw_only=True)
class Models:
    """The models of one model group in memory."""

    policy: Engine
    critic: Engine | None = None
    """Of ppo and ippo, unless it is a head on the policy's trunk."""
    reference: Callable[..., Any] | None = None
    """A frozen `PolicyScorer` of version `compared_with`, where a KL coefficient is set."""
    compared_with: int = 0
    shares_trunk: bool = False
    """Whether the policy's `PolicyScorer` has a value head (`critic.kind: shared`)."""

    @property
    def has_values(self) -> bool:
        """Says whether there is a critic of any kind."""
        return self.critic is not None or self.shares_trunk

    def compare_with_reference_of(self, store: WeightStore, parent: ModelVersionRef, config: TrainConfig) -> None:
        """Loads the reference of a job from `parent`, where a KL coefficient is set and it is another one than in memory."""
        version = reference_version(store.manifest(parent), every=config.loss.reference_every)
        if not config.loss.has_kl or (self.reference is not None and version == self.compared_with):
            return
        self._drop_reference()
        ref = _ref(store, parent.model_group, version)
        if store.manifest(ref).base is not None:
            self.reference = load_reference_of(self.policy, store, ref, config.deepspeed)
        else:
            self.reference = load_reference(store.fetch(ref), config.deepspeed)
        self.compared_with = version

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
        self._drop_reference()

    def _drop_reference(self) -> None:
        destroy = getattr(self.reference, "destroy", None)  # under ZeRO-3 it is a DeepSpeed engine, too
        self.reference = None
        if destroy is not None:
            destroy()


def build_models(store: WeightStore, parent: ModelVersionRef, config: TrainConfig) -> Models:
    """Builds the models that `config` asks for with the weights of `parent`; optimizers and critic are fresh.

    Raises ValueError where a KL coefficient is set and the reference is gone.
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
        trunk = _ref(store, parent.model_group, 0) if config.critic.kind == "frozen" else parent
        folder = store.fetch(whole_model(trunk))
        critic = Engine(
            load_critic(folder, settings, config.critic), optimizer=config.critic.optimizer, config=settings
        )
    models = Models(policy=policy, critic=critic, shares_trunk=shares_trunk)
    models.compare_with_reference_of(store, parent, config)
    return models


def reference_version(parent: Manifest, *, every: int) -> int:
    """Returns the version with which the KL terms of a job from `parent` compare.

        r(p) = p if floor(p / every) > floor(parent of p / every), else the reference with which p was trained

    So it is a version that training went through, also where rejections go back to a champion. `every` = 0: version 0.
    """
    if not every or parent.parent is None:
        return 0
    return parent.version if parent.version // every > parent.parent // every else parent.reference


def _ref(store: WeightStore, model_group: str, version: int) -> ModelVersionRef:
    ref = store.ref(model_group, version)
    if ref is None:
        raise ValueError(
            f"{store.uri_of(model_group, version)} does not exist: it is the reference of a KL term or the trunk of a frozen critic"
        )
    return ref
