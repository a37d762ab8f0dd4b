"""train_job: the record of one train job, which crosses processes as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from stores.types import ModelVersionRef, Purpose, RewardsRef, TracesRef
from train_loops.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One job: train version `version` of a model group from `parent`, on pinned traces and rewards; see `parse_job`."""

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
    """The version of this model group that sampled the episodes; None: the parent."""

    @property
    def parent_version(self) -> int | None:
        """Returns the parent's version; None where there is no parent."""
        return None if self.parent is None else self.parent.version

    @property
    def is_off_policy(self) -> bool:
        """Returns whether another version than the parent sampled the episodes."""
        return self.sampled_by is not None and self.sampled_by != self.parent_version


def parse_job(data: Mapping[str, Any]) -> TrainJob:
    """Checks a job as it crosses processes (dicts inside). Raises ValueError for what is missing or wrong."""
    try:
        traces, rewards = dict(data["traces"]), dict(data["rewards"])
        job = TrainJob(
            job_id=data["job_id"],
            run_id=data["run_id"],
            iteration=data["iteration"],
            model_group=data["model_group"],
            seed=data["seed"],
            parent=None if data["parent"] is None else ModelVersionRef(**data["parent"]),
            version=data["version"],
            traces=TracesRef(**traces | {"purpose": Purpose(traces["purpose"])}),
            rewards=RewardsRef(**rewards | {"purpose": Purpose(rewards["purpose"])}),
            credit_kind=data["credit_kind"],
            train=TrainConfig.model_validate(data["train"]),
            traces_uri=data["traces_uri"],
            weights_uri=data["weights_uri"],
            is_team=bool(data.get("is_team", False)),
            team=ModelVersionRef(**data["team"]) if data.get("team") else None,
            updated=tuple(ModelVersionRef(**ref) for ref in data.get("updated", ())),
            sampled_by=data.get("sampled_by"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"job {data.get('job_id')!r} is not whole: {type(error).__name__} {error}") from None
    if job.parent is None and not job.is_team:
        raise ValueError(f"job {job.job_id}: only the team's learner begins without a parent")
    if job.parent is not None and job.version <= job.parent.version:
        raise ValueError(f"job {job.job_id}: version {job.version} must follow parent {job.parent.version}")
    if job.sampled_by is not None and (type(job.sampled_by) is not int or job.sampled_by < 0):
        raise ValueError(
            f"job {job.job_id}: sampled_by is {job.sampled_by!r}: give the number of the version that sampled, from 0 on, "
            "or none where the parent did"
        )
    return job


def train_parts(began: float, ends: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """By part of a job, in order, Unix seconds of its begin and its end: each begins where the one before ended.

    Args: began: Unix seconds of the first begin; ends: by part, those of its end. See `stores.journal.stage_results.TrainParts`.
    """
    return dict(zip(ends, pairwise((began, *ends.values())), strict=True))
