"""train: traces and rewards at pinned versions + the parent -> a model version, a resumable checkpoint, metrics.

One call per model group. The work is done by the group's warm trainer; this stage gives the order and waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.retrain import train_config
from pipelines.run import Run, plain
from stores.logs import carry
from stores.types import ModelVersionRef
from train_loops.holder import TrainerHandle, attach


def train(run: Run, iteration: int, model_group: str, *, attempt: str = "0") -> dict[str, Any]:
    """Trains one model group on the iteration's scored turns.

    Returns {"model": ModelVersionRef, "reason", "metrics", "agents"}; without a trainable row the model is the parent's
    and the reason says why.
    """
    collected = run.journal.ref(run.key(iteration, "collect"))
    scored = run.journal.ref(run.key(iteration, "score"))
    if collected is None or scored is None:
        raise ValueError(f"train of iteration {iteration} needs collect and score, which are not done")
    parent = run.parents(iteration)[model_group]
    settings = run.config.train_config(model_group)
    trainer = trainer_of(run, model_group)
    given = make_order(
        run, iteration, model_group, parent=parent, traces=collected["traces"], rewards=scored["rewards"]
    )
    given["order_id"] += f"/{attempt}"
    try:
        result = trainer.order({**given, "log": carry()}, timeout_s=settings.order_timeout_s)
    finally:
        if not settings.keep_warm:
            trainer.stop()
    return {**result, "model": result["model"] or plain(parent)}


def make_order(
    run: Run,
    iteration: int,
    model_group: str,
    *,
    parent: ModelVersionRef,
    traces: Mapping[str, Any],
    rewards: Mapping[str, Any],
) -> dict[str, Any]:
    """What a trainer needs to make version `iteration` of a model group from `parent`; plain data."""
    return {
        "order_id": f"{run.run_id}/{iteration}/{model_group}",
        "run_id": run.run_id,
        "iteration": iteration,
        "model_group": model_group,
        "seed": run.config.seed + iteration,
        "parent": plain(parent),
        "version": iteration,
        "traces": traces,
        "rewards": rewards,
        "credit_kind": run.credit.kind,
        "train": train_config(run, iteration, model_group).model_dump(mode="json"),
        "traces_uri": run.traces_uri,
        "weights_uri": run.weights_uri,
    }


def trainer_of(run: Run, model_group: str) -> TrainerHandle:
    """The group's warm trainer, started if it is not running."""
    return attach(
        name=f"trainer-{run.run_id}-{model_group}",
        run_name=f"{run.run_id}-{model_group}",
        storage_path=f"{run.folder}/checkpoints",
        train=run.config.train_config(model_group),
    )
