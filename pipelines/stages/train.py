"""train: traces and rewards at pinned versions + the parent -> a model version, a resumable checkpoint, metrics.

One call per model group. The work is done by the group's warm trainer; this stage sends it a job and waits.

Where the whole team learns (mappo, happo, mixers) it is one call for all of them, named `team`:

    the team's learner ──signal──> model groups, one after another (happo: in an order drawn anew, each weighed by M)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pipelines.cluster.faults import FaultKind, diagnose
from pipelines.run.champions import champion_version
from pipelines.run.cpu_threads import trainer_threads
from pipelines.run.iteration import Iteration
from pipelines.run.run import Run
from pipelines.stages.table import StageCall
from stores.journal.run_values import RunValue
from stores.journal.stage_results import TrainAnswer, Trained, TrainedTeam
from stores.logs import carry
from stores.types import ModelVersionRef
from train_loops.config import TEAM, TrainConfig
from train_loops.signal.happo import update_order
from train_loops.train_job import TrainJob
from train_loops.worker.trainer_handle import TrainerHandle, TrainJobError, attach

logger = logging.getLogger(__name__)


def train(call: StageCall) -> Trained | TrainedTeam:
    """Trains one model group, or the whole team, on the iteration's scored turns.

    Without a trainable row a result's model is the parent's and its reason says why. So it is where training of a model group failed
    for good and `promote.on_failed_group` lets the others go on; else TrainJobError ends the stage.
    """
    run, iteration = call.run, call.iteration
    if run.config.team_config is not None:
        return _train_team(run, iteration, run.config.team_config, attempt=str(call.lease.token))
    parent = iteration.models[call.model_group]
    try:
        with gpus_for_training(run, call.model_group):
            return _train_group(run, iteration, call.model_group, attempt=str(call.lease.token))
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


def recover(run: Run, model_group: str) -> None:
    """Ends the trainers: see `Stage.recover`."""
    for group in [model_group] if model_group in run.config.model_groups else run.config.model_groups:
        trainer_of(run, group).stop()


def _train_team(run: Run, iteration: Iteration, settings: TrainConfig, *, attempt: str) -> TrainedTeam:
    """Trains the team's learner and then every model group on the iteration's scored turns.

    The order of updates is in the journal before the first one. A repetition continues: what is committed is not trained
    again.
    """
    order, number = list(run.config.model_groups), iteration.number
    if settings.estimator.updates_in_turn:
        order = update_order(order, seed=run.config.seed, iteration=number, order=settings.team.order)
    run.journal.put_value(run.run_id, RunValue.UPDATE_ORDER.of(number), {"model_groups": order})
    with gpus_for_training(run):
        learner = _train_learner(run, iteration, via=next(iter(iteration.models)), attempt=attempt)
        trained: dict[str, Trained] = {}
        updated: list[ModelVersionRef] = []
        for group in order:
            # HAPPO weighs each update by the ratios of the updates before it (arXiv 2109.11251).
            weighed = updated if settings.estimator.updates_in_turn else ()
            trained[group] = _train_group(run, iteration, group, attempt=attempt, team=learner.model, updated=weighed)
            if trained[group].model.version == number:
                updated = [*updated, trained[group].model]
    return TrainedTeam(order=tuple(order), team=learner, model_groups=trained)


def _train_group(run: Run, iteration: Iteration, model_group: str, *, attempt: str, **job: Any) -> Trained:
    parent = iteration.models[model_group]
    made = make_train_job(run, iteration, model_group, parent=parent, **job)
    answer = _run_job(run, model_group, made, attempt=attempt)
    return Trained(
        model=answer.model or parent,
        reason=answer.reason,
        metrics=answer.metrics,
        agents=answer.agents,
        parts=answer.parts,
    )


def _train_learner(run: Run, iteration: Iteration, *, via: str, attempt: str) -> TrainAnswer:
    """Trains the team's learner in the trainer of model group `via`, from its version before this iteration if there is one."""
    before = [version for version in run.weights.versions(TEAM) if version < iteration.number]
    parent = run.weights.ref(TEAM, before[-1]) if before else None
    job = make_train_job(run, iteration, TEAM, parent=parent, train=train_config(run, via), is_team=True)
    return _run_job(run, via, job, attempt=attempt)


def _run_job(run: Run, via: str, job: TrainJob, *, attempt: str) -> TrainAnswer:
    """Has the trainer of model group `via` do a job."""
    trainer = trainer_of(run, via)
    try:
        job = replace(job, job_id=f"{job.job_id}/{attempt}", log=carry())
        return trainer.run_job(job, timeout_s=job.train.job_timeout_s)
    finally:
        if not job.train.keep_warm:
            trainer.stop()


def make_train_job(
    run: Run,
    iteration: Iteration,
    model_group: str,
    *,
    parent: ModelVersionRef | None,
    train: TrainConfig | None = None,
    is_team: bool = False,
    team: ModelVersionRef | None = None,
    updated: Sequence[ModelVersionRef] = (),
) -> TrainJob:
    """What a trainer needs to make the iteration's version of a model group from `parent`.

    Args:
        train: the settings; None: the model group's.
        team, updated: see `TrainJob`.
    """
    number, collected = iteration.number, iteration.collected
    goes_back = run.config.promote.on_reject == "champion" and not is_team and champion_version(run) is not None
    is_foreign = iteration.source is not None
    sampled_by = None if is_foreign else collected.policy_versions.get(model_group)
    return TrainJob(
        job_id=f"{run.run_id}/{number}/{model_group}",
        run_id=run.run_id,
        iteration=number,
        model_group=model_group,
        seed=run.config.seed + number,
        parent=parent,
        sampled_by=sampled_by,
        is_foreign=is_foreign,
        champion=run.champion()[model_group].version if goes_back else None,
        version=number,
        traces=collected.traces,
        rewards=iteration.scored.rewards,
        credit_kind=run.credit.kind,
        train=train or train_config(run, model_group),
        traces_uri=run.traces_uri,
        weights_uri=run.weights_uri,
        is_team=is_team,
        team=team,
        updated=tuple(updated),
        leaves_gpu=run.config.pool == "shared",
    )


def train_config(run: Run, model_group: str) -> TrainConfig:
    """How a model group learns: where the configured loss divides by the agents' limit, `loss.norm_tokens` is that limit."""
    config = run.config.train_config(model_group)
    if config.loss.aggregation != "seq_mean_token_sum_norm" or config.loss.norm_tokens is not None:
        return config
    # The limits of all agents that the group ever acts for: with `swap` the divisor stays the same too.
    agents = run.config.agents_of(model_group)
    limit = max(run.sampling(name, run.workflow.agents[name]).max_tokens for name in agents)
    return config.model_copy(update={"loss": config.loss.model_copy(update={"norm_tokens": limit})})


def trainer_of(run: Run, model_group: str) -> TrainerHandle:
    """The group's warm trainer, started if it is not running."""
    return attach(
        name=f"trainer-{run.run_id}/{model_group}",  # by `-` group a-b of run r would be group b of run r-a
        run_name=f"{run.run_id}-{model_group}",
        storage_path=f"{run.folder}/checkpoints",
        train=run.config.train_config(model_group),
        threads=trainer_threads(run, model_group),
    )


@contextmanager
def gpus_for_training(run: Run, model_group: str = "") -> Iterator[None]:
    """Keeps the run's engines asleep inside, where they share GPUs with the trainers (`pool: shared`); else it does nothing.

        engines sleep ──> the trainer loads its state, trains, commits, leaves the GPU ──> engines wake ──> sync

    Whoever begins train may be killed at any moment. The trainer ends its job without it and leaves the GPU by itself; the
    engines then wake at the next stage that asks them for something (`serving.serve`), or at the deadline of stage train.

    All of them sleep, because Ray may have placed the trainer beside any of them. After a failure they are told to wake, but
    nothing waits for it: a trainer that is still at work, as after Ctrl-C, keeps its GPU until its job ends.

    Args: model_group: the one that is trained; empty: all of them.

    Raises TimeoutError where an engine does not fall asleep, or does not wake because its GPU has no room.
    """
    if run.config.pool == "separate":
        yield
        return
    from pipelines.run.serving import app_names  # imports ray.serve, which stage train needs for nothing else
    from serve_apps.policy.live_settings import put_to_sleep, wake_apps

    groups = [model_group] if model_group else list(run.config.model_groups)
    train_s = sum(run.config.train_config(group).stage_timeout_s for group in groups)
    wait_s = max(run.config.serve_config(group).start_timeout_s for group in run.config.model_groups)
    apps = list(app_names(run).values())
    try:
        put_to_sleep(apps, until=time.time() + train_s, timeout_s=wait_s)
        yield
    except BaseException:
        wake_apps(apps, timeout_s=0)
        raise
    wake_apps(apps, timeout_s=wait_s)
