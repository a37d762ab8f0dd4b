"""ask: what only a process on the cluster can say. `python -m tests.chaos.ask served|replay ROOT ITERATIONS`; JSON.

served   versions that every replica says it serves, by model group
replay   the chaos run's own episodes, trained once more by a trainer that nothing disturbs: largest difference of every
         version's weights, by iteration. It holds its optimizer in memory from the first order to the last.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from pipelines.cluster.connect import connect, disconnect
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.run.serving import app_names, serve
from pipelines.stages.steps import begin
from pipelines.stages.table import STAGES
from pipelines.stages.train import make_train_job
from stores.types import ModelVersionRef
from tests.chaos.scene import CONFIG, ON_ONE_NODE


def served(run: Run) -> dict[str, list[int]]:
    """By model group.

    A cluster that was lost after the last stage that needs engines has none: they are put back as the next collect does.
    """
    from serve_apps.policy.deployment import served_models

    apps = app_names(run)
    if not any(served_models(apps).values()):
        serve(run, run.parents(run.config.iterations + 1))
    return {group: sorted(version for version, _ in found.values()) for group, found in served_models(apps).items()}


def replay(run: Run) -> dict[int, float]:
    """By iteration, for the model group `team`."""
    from train_loops.worker.trainer_handle import attach

    folder = Path(run.config.storage.root) / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    settings = run.config.train_config("team").model_copy(update={"cpus_per_worker": ON_ONE_NODE})
    trainer = attach(name="replay", run_name="replay", storage_path=folder / "checkpoints", train=settings)
    parent, differences = run.trained(0)["team"], {}
    for iteration in range(1, run.config.iterations + 1):
        done = run.iteration(iteration)
        if "team" not in done.find_trained():
            break
        job = make_train_job(run, begin(run, STAGES["train"], iteration), "team", parent=parent)
        parent = trainer.run_job(replace(job, weights_uri=str(folder / "weights")), timeout_s=120).model or parent
        differences[iteration] = distance(run, run.trained(iteration)["team"], parent)
    trainer.stop()
    return differences


def distance(run: Run, one: ModelVersionRef, other: ModelVersionRef) -> float:
    """Largest difference of two versions' weights; 0 where they are equal to the bit."""
    from safetensors.numpy import load_file

    mine, theirs = (load_file(run.weights.fetch(ref) / "model.safetensors") for ref in (one, other))
    return max(float(abs(mine[name] - theirs[name]).max()) for name in theirs)


def main(question: str, root: str, iterations: str) -> None:
    """Prints the answer as the last line."""
    run = Run(load_config(CONFIG, {"storage.root": root, "iterations": int(iterations)}))
    connect()
    answer = {"served": served, "replay": replay}[question](run)
    disconnect()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
