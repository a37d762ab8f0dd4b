"""train: traces and rewards at pinned versions + the parent -> a model version, a resumable checkpoint, metrics.

One call per model group. The work is done by the group's warm trainer; this stage sends it a job and waits.

Where the whole team learns (mappo, happo, mixers) it is one call for all of them, named `team`:

    the team's learner ──signal──> model groups, one after another (happo: in an order drawn anew, each weighed by M)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.cluster.faults import FaultKind, diagnose
from pipelines.episodes.from_run import source_of, train_config
from pipelines.run.cpu_threads import trainer_threads
from pipelines.run.run import Run, plain
from pipelines.run.shared_pool import gpus_for_training
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Trained, TrainedLearner, TrainedTeam
from stores.logs import carry
from stores.types import ModelVersionRef, RewardsRef, TracesRef
from train_loops.config import TEAM, TrainConfig
from train_loops.signal.happo import update_order
from train_loops.worker.trainer_handle import TrainerHandle, TrainJobError, attach

logger = logging.getLogger(__name__)


def train(run: Run, iteration: int, model_group: str, *, attempt: str = "0") -> Trained:
    """Trains one model group on the iteration's scored turns.

    Without a trainable row the result's model is the parent's and its reason says why. So it is where training failed for
    good and `promote.on_failed_group` lets the others go on; else TrainJobError ends the stage.

    Args: attempt: names this attempt of the stage to the trainer.
    """
    data = _pinned_data(run, iteration)
    parent = run.parents(iteration)[model_group]
    try:
        with gpus_for_training(run, model_group):
            return _train_group(run, iteration, model_group, attempt=attempt, parent=parent, **data)
    except TrainJobError as error:
        if run.config.promote.on_failed_group == "fail" or diagnose(error).kind is FaultKind.LOST:
            raise
        first_line = str(error).partition("\n")[0]
        logger.warning("keeps version %d, its training failed: %s", parent.version, error.kind)
        return Trained(
            model=parent,
            reason=f"training failed: {first_line}",
            is_failed=True,
            metrics={"train/is_failed": 1.0},
            agents={},
        )


def train_team(run: Run, iteration: int, *, attempt: str = "0") -> TrainedTeam:
    """Trains the team's learner and then every model group on the iteration's scored turns.

    The order of updates is in the journal before the first one. A repetition continues: what is committed is not trained
    again.
    """
    data = _pinned_data(run, iteration)
    parents = run.parents(iteration)
    settings = run.config.team_config
    assert settings is not None, "stages/table.py: only a run whose team learns comes here"
    order = list(run.config.model_groups)
    if settings.estimator.updates_in_turn:
        order = update_order(order, seed=run.config.seed, iteration=iteration, order=settings.team.order)
    run.journal.put_value(run.run_id, RunValue.UPDATE_ORDER.of(iteration), {"model_groups": order})
    with gpus_for_training(run):
        learner = _train_learner(run, iteration, via=next(iter(parents)), attempt=attempt, **data)
        trained: dict[str, Trained] = {}
        updated: list[ModelVersionRef] = []
        for group in order:
            trained[group] = _train_group(
                run,
                iteration,
                group,
                attempt=attempt,
                parent=parents[group],
                team=learner.model,
                # HAPPO weighs each update by the ratios of the updates before it (arXiv 2109.11251).
                updated=updated if settings.estimator.updates_in_turn else (),
                **data,
            )
            if trained[group].model.version == iteration:
                updated = [*updated, trained[group].model]
    return TrainedTeam(order=tuple(order), team=learner, model_groups=trained)


def _pinned_data(run: Run, iteration: int) -> dict[str, Any]:
    done = run.iteration(iteration, needed_by="train")
    return {"traces": done.collected.traces, "rewards": done.scored.rewards}


def _sampled_by(run: Run, iteration: int, model_group: str) -> int | None:
    """Returns the version that sampled the iteration's episodes; None where another run's policies did, whose weights are not here."""
    if source_of(run, iteration) is not None:
        return None
    return run.iteration(iteration).collected.policy_versions.get(model_group)


def _train_group(
    run: Run, iteration: int, model_group: str, *, attempt: str, parent: ModelVersionRef, **job: Any
) -> Trained:
    result = _run_job(
        run, model_group, make_train_job(run, iteration, model_group, parent=parent, **job), attempt=attempt
    )
    return Trained.from_json({**result, "model": result["model"] or plain(parent)})


def _train_learner(run: Run, iteration: int, *, via: str, attempt: str, **data: Any) -> TrainedLearner:
    """Trains the team's learner in the trainer of model group `via`."""
    settings = train_config(run, iteration, via)
    job = make_train_job(run, iteration, TEAM, parent=_last_learner(run, iteration), train=settings, **data)
    return TrainedLearner.from_json(_run_job(run, via, {**job, "is_team": True}, attempt=attempt))


def _last_learner(run: Run, iteration: int) -> ModelVersionRef | None:
    """The version of the team's learner before this iteration; None in the first one."""
    before = [version for version in run.weights.versions(TEAM) if version < iteration]
    return run.weights.ref(TEAM, before[-1]) if before else None


def _run_job(run: Run, via: str, job: Mapping[str, Any], *, attempt: str) -> dict[str, Any]:
    """Has the trainer of model group `via` do a job; returns what `TrainerHandle.run_job` does."""
    settings = TrainConfig.model_validate(job["train"])
    trainer = trainer_of(run, via)
    job = {**job, "job_id": f"{job['job_id']}/{attempt}", "log": carry()}
    try:
        return trainer.run_job(job, timeout_s=settings.job_timeout_s)
    finally:
        if not settings.keep_warm:
            trainer.stop()


def make_train_job(
    run: Run,
    iteration: int,
    model_group: str,
    *,
    parent: ModelVersionRef | None,
    traces: TracesRef,
    rewards: RewardsRef,
    train: TrainConfig | None = None,
    team: ModelVersionRef | None = None,
    updated: Sequence[ModelVersionRef] = (),
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
        "sampled_by": _sampled_by(run, iteration, model_group),
        "version": iteration,
        "traces": plain(traces),
        "rewards": plain(rewards),
        "credit_kind": run.credit.kind,
        "train": (train or train_config(run, iteration, model_group)).model_dump(mode="json"),
        "traces_uri": run.traces_uri,
        "weights_uri": run.weights_uri,
        "team": None if team is None else plain(team),
        "updated": [plain(ref) for ref in updated],
        "leaves_gpu": run.config.pool == "shared",
    }


def trainer_of(run: Run, model_group: str) -> TrainerHandle:
    """The group's warm trainer, started if it is not running."""
    return attach(
        name=f"trainer-{run.run_id}-{model_group}",
        run_name=f"{run.run_id}-{model_group}",
        storage_path=f"{run.folder}/checkpoints",
        train=run.config.train_config(model_group),
        threads=trainer_threads(run, model_group),
    )
