"""stages: the one room behind four doors. A stage's key -> its recorded ref, doing the work at most once.

The local runner, `troupe stage`, a Ray job and an Airflow task all come through `run_stage`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pipelines.cluster.observe import tell_stages
from pipelines.episodes.sampling import Progress
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from stores.journal import Lease

logger = logging.getLogger(__name__)

STAGES = ("collect", "score", "train", "sync", "evaluate", "promote")
"""The loop, in order."""
ON_ENGINES = ("collect", "sync", "evaluate")
"""Stages that say which versions the engines serve: nobody else may change them meanwhile."""


def run_stage(
    run: Run, stage: str, iteration: int, *, model_group: str = "", progress: Progress | None = None
) -> dict[str, Any]:
    """Does a stage unless it is done, and returns what the journal holds of it.

    Raises ValueError for an unknown stage or model group, or a stage whose predecessors are not done.
    """
    key = run.key(iteration, stage, model_group)
    watchdog = Watchdog(
        run, key, timeout_s=_timeout_s(run, stage, model_group), recover=_recover(run, stage, model_group)
    )
    work = _work(run, stage, iteration, model_group, watchdog.reporting(progress))
    try:
        alone = run.hold_engines() if stage in ON_ENGINES else None
        return watchdog.once(_logged(work), alone=alone)
    finally:
        tell_stages(row for k in (iteration - 1, iteration) for row in run.journal.stages(run.run_id, k))


def _logged(work: Callable[[Lease], dict[str, Any]]) -> Callable[[Lease], dict[str, Any]]:
    def logged(lease: Lease) -> dict[str, Any]:
        began = time.monotonic()
        logger.info("begins, attempt %d", lease.token)
        try:
            ref = work(lease)
        except BaseException as error:  # its message may quote a prompt; it is in the journal
            level = logging.INFO if isinstance(error, KeyboardInterrupt) else logging.ERROR
            logger.log(level, "failed after %.1f s: %s", time.monotonic() - began, type(error).__name__)
            raise
        logger.info("done in %.1f s", time.monotonic() - began)
        return ref

    return logged


def _timeout_s(run: Run, stage: str, model_group: str) -> float:
    if stage == "train" and model_group in run.config.model_groups:
        return run.config.train_config(model_group).stage_timeout_s
    if stage == "train" and model_group in run.config.train_tasks:
        return sum(run.config.train_config(group).stage_timeout_s for group in run.config.model_groups)
    if stage == "promote" and run.config.promote.into_service == "canary":
        return run.config.promote.stage_timeout_s + run.config.canary_timeout_s
    return float(getattr(run.config, stage).stage_timeout_s) if stage in STAGES else 0.0


def _recover(run: Run, stage: str, model_group: str) -> Callable[[], None]:
    """What ends a part that hangs and outlives its stage, so that a repetition starts with a new one.

    A hung replica needs nobody: Serve's health checks replace it. Trainers are found by name.
    """

    def end_trainer() -> None:
        from pipelines.stages.train import trainer_of

        for group in [model_group] if model_group in run.config.model_groups else run.config.model_groups:
            trainer_of(run, group).stop()

    def end_collectors() -> None:
        from pipelines.episodes.collector import end_collectors

        end_collectors()

    return {"train": end_trainer, "collect": end_collectors, "evaluate": end_collectors}.get(stage, lambda: None)


def _work(
    run: Run, stage: str, iteration: int, model_group: str, progress: Progress
) -> Callable[[Lease], dict[str, Any]]:
    if stage == "train":
        if model_group not in run.config.train_tasks:
            known = ", ".join(run.config.train_tasks)
            raise ValueError(f"stage train needs --model-group, one of {known} (got {model_group!r})")
        from pipelines.stages.train import train, train_team

        if run.config.team_config is not None:
            return lambda lease: train_team(run, iteration, attempt=str(lease.token))
        return lambda lease: train(run, iteration, model_group, attempt=str(lease.token))
    if model_group:
        raise ValueError(f"stage {stage} is done for all model groups at once: drop --model-group")
    if stage == "collect":
        from pipelines.stages.collect import collect

        return lambda lease: collect(run, iteration, progress=progress)
    if stage == "score":
        from pipelines.stages.score import score

        return lambda lease: score(run, iteration)
    if stage == "sync":
        from pipelines.stages.sync import sync

        return lambda lease: sync(run, iteration, lease)
    if stage == "evaluate":
        from pipelines.stages.evaluate import evaluate

        return lambda lease: evaluate(run, iteration, progress=progress)
    if stage == "promote":
        from pipelines.stages.promote import promote

        return lambda lease: promote(run, iteration, lease)
    raise ValueError(f"unknown stage {stage!r}: one of {', '.join(STAGES)}")
