"""models: what one order trains, and what it compares with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train_loops.engine import Engine


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
