"""stage_records: small complete stage results, and a way to record them as done."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pipelines.run.run import Run
from pipelines.stages.steps import begin
from pipelines.stages.table import STAGES, StageCall
from stores.journal.stage_results import (
    Collected,
    Decided,
    Evaluated,
    Measured,
    Scored,
    StageResult,
    Synced,
    TeamScore,
    TrainAnswer,
    Trained,
)
from stores.types import ModelVersionRef, Purpose, RewardsRef, TracesRef


def traces_ref(**changes: Any) -> TracesRef:
    ref = {"uri": "traces", "version": 7, "tag": "t", "run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN}
    return TracesRef(**{**ref, "team_key": "team", "num_episodes": 4, **changes})


def rewards_ref(**changes: Any) -> RewardsRef:
    ref = {"uri": "traces", "version": 3, "tag": "r", "run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN}
    return RewardsRef(**{**ref, "credit_version": "c1", "num_episodes": 4, **changes})


def model_ref(group: str, version: int) -> ModelVersionRef:
    return ModelVersionRef(model_group=group, version=version, uri=f"{group}/{version}", manifest_sha256=f"{version}")


def collected(**changes: Any) -> Collected:
    fields: dict[str, Any] = {
        "traces": traces_ref(),
        "policy_versions": {"a": 0},
        "statuses": {"ok": 4},
        "num_new": 4,
        "num_tokens": 40,
        "sampling_seconds": 1.5,
        "groups": {"wanted": 2, "planned": 2, "done": 2},
        "stopped_by": None,
        "carried": (),
    }
    return Collected(**{**fields, **changes})


def scored(**changes: Any) -> Scored:
    figures = {"reward": 0.5, "format_share": 1.0, "calls": 4.0, "completion_tokens": 10.0}
    fields = {"rewards": rewards_ref(), "credit_version": "c1", "outcome": 0.5, "agents": {"solver": figures}}
    return Scored(**{**fields, **changes})


def trained(group: str = "a", version: int = 1, **changes: Any) -> Trained:
    fields: dict[str, Any] = {"model": model_ref(group, version), "reason": "", "metrics": {}, "agents": {}}
    return Trained(**{**fields, **changes})


def learner(**changes: Any) -> TrainAnswer:
    return TrainAnswer(**{"model": model_ref("team", 1), "reason": "", "metrics": {}, "agents": {}, **changes})


def synced(**changes: Any) -> Synced:
    return Synced(**{"policy_versions": {"a": 1}, "proofs": (), "seconds": 0.4, **changes})


def team_score(**changes: Any) -> TeamScore:
    fields: dict[str, Any] = {
        "policy_versions": {"a": 1},
        "accuracy": 0.5,
        "ci95": (0.4, 0.6),
        "num_tasks": 20,
        "num_failed": 0,
        "k": 2,
        "pass_at_k": 0.7,
        "ok_share": 1.0,
        "agents": {"solver": {"reward": 0.5, "format_share": 1.0}},
        "sources": {"sums": 0.5},
        "traces": traces_ref(purpose=Purpose.GATE),
    }
    return TeamScore(**{**fields, **changes})


def evaluated(**changes: Any) -> Evaluated:
    return Evaluated(**{"verdict": "promote", "condition": "gain +0.2", "candidate": team_score(), **changes})


def decided(**changes: Any) -> Decided:
    return Decided(**{"verdict": "promote", "condition": "gain +0.2", "team_version": 2, **changes})


def measured(**changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "score": team_score(),
        "iteration": 1,
        "outcomes": {"t0": (1.0, 0.0)},
        "sampling_seconds": 1.0,
        "num_tokens": 10,
    }
    return Measured(**{**fields, **changes})


def call(run: Run, stage: str, iteration: int, *, model_group: str = "", **read: Any) -> StageCall:
    """What a stage's work is given. Args: read: parts of the iteration to put in the place of what was read; only these are needed then."""
    lease: Any = SimpleNamespace(check=lambda: None, token=1)
    begun = replace(run.iteration(iteration, needed_by=stage), **read) if read else begin(run, STAGES[stage], iteration)
    return StageCall(run=run, iteration=begun, model_group=model_group, lease=lease)


def finish(run: Run, iteration: int, result: StageResult, model_group: str = "") -> None:
    """Records the stage of a result as done."""
    run.journal.once(run.key(iteration, result.STAGE, model_group), lambda lease: result.to_json())
