"""train: traces and rewards at pinned versions + the parent -> a model version, a resumable checkpoint, metrics.

One call per model group. The work is done by the group's warm trainer; this stage gives the order and waits.

Where the whole team learns (mappo, happo, mixers) it is one call for all of them, named `team`:

    the team's learner ──signal──> model groups, one after another (happo: in an order drawn anew, each weighed by M)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.cluster.faults import FaultKind, diagnose
from pipelines.episodes.from_run import train_config
from pipelines.run.run import Run, plain
from stores.logs import carry
from stores.types import ModelVersionRef
from train_loops.config import TEAM, TrainConfig
from train_loops.team.happo import update_order
from train_loops.trainer_handle import TrainerHandle, TrainJobError, attach

logger = logging.getLogger(__name__)


def train(run: Run, iteration: int, model_group: str, *, attempt: str = "0") -> dict[str, Any]:
    """Trains one model group on the iteration's scored turns.

    Returns {"model": ModelVersionRef, "reason", "metrics", "agents"}; without a trainable row the model is the parent's
    and the reason says why. So it is, with {"is_failed": True}, where training failed for good and
    `promote.on_failed_group` lets the others go on; else TrainJobError ends the stage.
    """
    inputs = _inputs(run, iteration)
    parent = run.parents(iteration)[model_group]
    try:
        return _ordered(run, iteration, model_group, attempt=attempt, parent=parent, **inputs)
    except TrainJobError as error:
        if run.config.promote.on_failed_group == "hold" or diagnose(error).kind is FaultKind.LOST:
            raise
        said = str(error).partition("\n")[0]
        logger.warning("keeps version %d, its training failed: %s", parent.version, error.kind)
        return {
            "model": plain(parent),
            "reason": f"training failed: {said}",
            "is_failed": True,
            "metrics": {"train/is_failed": 1.0},
            "agents": {},
        }


def train_team(run: Run, iteration: int, *, attempt: str = "0") -> dict[str, Any]:
    """Trains the team's learner and then every model group on the iteration's scored turns.

    Returns {"order", "team": result of the learner, "model_groups": {name: what `train` returns}}. The order of updates is
    in the journal before the first one. Killed and repeated it goes on: what is committed is not trained again.
    """
    inputs = _inputs(run, iteration)
    parents = run.parents(iteration)
    settings = run.config.team_config
    assert settings is not None, "stages: only a run whose team learns comes here"
    order = list(run.config.model_groups)
    if settings.algorithm == "happo":
        order = update_order(order, seed=run.config.seed, iteration=iteration, order=settings.team.order)
    run.journal.put_value(run.run_id, f"update-order/{iteration}", {"model_groups": order})
    team = _ordered(
        run, iteration, TEAM, attempt=attempt, parent=_last_learner(run, iteration), via=next(iter(parents)), **inputs
    )
    found: dict[str, dict[str, Any]] = {}
    updated: list[dict[str, Any]] = []
    for group in order:
        learned = _ordered(
            run,
            iteration,
            group,
            attempt=attempt,
            parent=parents[group],
            team=team["model"],
            updated=updated if settings.algorithm == "happo" else [],
            **inputs,
        )
        found[group] = learned
        if learned["model"]["version"] == iteration:
            updated = [*updated, learned["model"]]
    return {"order": order, "team": team, "model_groups": found}


def _inputs(run: Run, iteration: int) -> dict[str, Any]:
    collected = run.journal.ref(run.key(iteration, "collect"))
    scored = run.journal.ref(run.key(iteration, "score"))
    if collected is None or scored is None:
        raise ValueError(f"train of iteration {iteration} needs collect and score, which are not done")
    return {"traces": collected["traces"], "rewards": scored["rewards"]}


def _last_learner(run: Run, iteration: int) -> ModelVersionRef | None:
    """The version of the team's learner before this iteration; None in the first one."""
    before = [version for version in run.weights.versions(TEAM) if version < iteration]
    return run.weights.ref(TEAM, before[-1]) if before else None


def _ordered(
    run: Run,
    iteration: int,
    model_group: str,
    *,
    attempt: str,
    parent: ModelVersionRef | None,
    via: str = "",
    **inputs: Any,
) -> dict[str, Any]:
    """Has an order done by the trainer of `via` (default: the model group's own)."""
    settings = train_config(run, iteration, via or model_group)
    trainer = trainer_of(run, via or model_group)
    given = make_order(run, iteration, model_group, parent=parent, train=settings, **inputs)
    given |= {"job_id": f"{given['job_id']}/{attempt}", "is_team": bool(via)}
    try:
        result = trainer.run_job({**given, "log": carry()}, timeout_s=settings.job_timeout_s)
    finally:
        if not settings.keep_warm:
            trainer.stop()
    kept = plain(parent) if parent is not None and not via else None
    return {**result, "model": result["model"] or kept}


def make_order(
    run: Run,
    iteration: int,
    model_group: str,
    *,
    parent: ModelVersionRef | None,
    traces: Mapping[str, Any],
    rewards: Mapping[str, Any],
    train: TrainConfig | None = None,
    team: Mapping[str, Any] | None = None,
    updated: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """What a trainer needs to make version `iteration` of a model group from `parent`; plain data.

    Args:
        train: the settings; None: the model group's.
        team, updated: see `train_loops.train_job.TrainJob`.
    """
    return {
        "job_id": f"{run.run_id}/{iteration}/{model_group}",
        "run_id": run.run_id,
        "iteration": iteration,
        "model_group": model_group,
        "seed": run.config.seed + iteration,
        "parent": None if parent is None else plain(parent),
        "version": iteration,
        "traces": traces,
        "rewards": rewards,
        "credit_kind": run.credit.kind,
        "train": (train or train_config(run, iteration, model_group)).model_dump(mode="json"),
        "traces_uri": run.traces_uri,
        "weights_uri": run.weights_uri,
        "team": team,
        "updated": list(updated),
    }


def trainer_of(run: Run, model_group: str) -> TrainerHandle:
    """The group's warm trainer, started if it is not running."""
    return attach(
        name=f"trainer-{run.run_id}-{model_group}",
        run_name=f"{run.run_id}-{model_group}",
        storage_path=f"{run.folder}/checkpoints",
        train=run.config.train_config(model_group),
    )
