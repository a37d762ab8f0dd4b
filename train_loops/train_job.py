"""train_job: the record of one train job, which crosses processes. Its answer is `stores.journal.stage_results.TrainAnswer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from stores.types import ModelVersionRef, RewardsRef, TracesRef
from train_loops.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One job: train version `version` of a model group from `parent`, on pinned traces and rewards.

    Raises ValueError for versions that cannot be.
    """

    job_id: str
    run_id: str
    iteration: int
    model_group: str
    """The model group to train, or `TEAM` where `is_team`."""
    seed: int
    parent: ModelVersionRef | None
    """None for the first version of the team's learner only."""
    version: int
    traces: TracesRef
    rewards: RewardsRef
    credit_kind: Literal["returns", "increments"]
    train: TrainConfig
    traces_uri: str
    weights_uri: str
    is_team: bool = False
    """Whether the whole team's learner is trained. (A model group may be called `team` where there is none.)"""
    team: ModelVersionRef | None = None
    """The version of the whole-team learner that holds the signal for these traces, where there is one."""
    updated: tuple[ModelVersionRef, ...] = ()
    """HAPPO: the versions of other model groups that were trained before this one in this iteration, in order."""
    sampled_by: int | None = None
    """The version of this model group that sampled the episodes; None: the parent, or a policy whose weights are not here."""
    is_foreign: bool = False
    """Whether another run's policies sampled the episodes."""
    champion: int | None = None
    """The version that training goes back to after a rejection; None: to none. Its checkpoint stays."""
    leaves_gpu: bool = False
    """Whether the trainer gives its GPU up after the job: an engine that serves has it then (`pool: shared`)."""
    log: Mapping[str, Any] = field(default_factory=dict)
    """What `stores.logs.carry` gives: the fields of the sender's log lines."""

    def __post_init__(self) -> None:
        if self.parent is None and not self.is_team:
            raise ValueError(f"job {self.job_id}: only the team's learner begins without a parent")
        if self.parent is not None and self.version <= self.parent.version:
            raise ValueError(f"job {self.job_id}: version {self.version} must follow parent {self.parent.version}")
        if self.sampled_by is not None and (type(self.sampled_by) is not int or self.sampled_by < 0):
            raise ValueError(
                f"job {self.job_id}: sampled_by is {self.sampled_by!r}: give the number of the version that sampled, from 0 on, "
                "or none where the parent did"
            )

    @property
    def parent_version(self) -> int | None:
        """Returns the parent's version; None where there is no parent."""
        return None if self.parent is None else self.parent.version

    @property
    def is_off_policy(self) -> bool:
        """Returns whether another version than the parent sampled the episodes."""
        return self.is_foreign or (self.sampled_by is not None and self.sampled_by != self.parent_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFailure:
    """Why a job failed."""

    kind: str
    """The exception that was raised."""
    message: str


def train_parts(began: float, ends: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """By part of a job, in order, Unix seconds of its begin and its end: each begins where the one before ended.

    Args: began: Unix seconds of the first begin; ends: by part, those of its end. See `stores.journal.stage_results.TrainParts`.
    """
    return dict(zip(ends, pairwise((began, *ends.values())), strict=True))
