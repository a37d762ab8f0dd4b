"""serving: which policy app serves which model group of a run, and getting it to serve given versions."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipelines.run import Run
from serve_apps.deployment import PolicyAppSpec, Proof, ensure_apps, served_versions, sync_apps
from stores.types import ModelVersionRef


def app_names(run: Run) -> dict[str, str]:
    """Serve application of every model group."""
    return {group: f"{run.run_id}-rollout-{group}" for group in run.config.model_groups}


def serve(run: Run, models: Mapping[str, ModelVersionRef], *, always_prove: bool = False) -> tuple[list[Proof], float]:
    """Makes every replica serve `models`: starts apps that are missing, swaps weights in place where they differ.

    Returns the proofs (empty where everything was served already and `always_prove` is off) and the seconds of the swap.
    Raises SyncError where a replica fails its proof.
    """
    start(run, models)
    apps = app_names(run)
    wanted = {apps[group]: ref for group, ref in models.items()}
    if not always_prove:
        served = served_versions(list(wanted))
        if all(set(served[app].values()) == {ref.version} for app, ref in wanted.items()):
            return [], 0.0
    began = time.perf_counter()
    targets = {app: (ref, _parent(run, ref)) for app, ref in wanted.items()}
    proofs = sync_apps(
        targets, run.weights, tolerance=run.config.sync.proof_tolerance, timeout_s=run.config.sync.timeout_s
    )
    return proofs, time.perf_counter() - began


def start(run: Run, models: Mapping[str, ModelVersionRef]) -> None:
    """Deploys the run's policy apps and waits until they answer; those that run stay as they are."""
    ensure_apps(
        [
            PolicyAppSpec(
                name=name,
                model_group=group,
                model=models[group],
                serve=run.config.serve_config(group),
            )
            for group, name in app_names(run).items()
        ],
        state_file=f"{run.folder}/serve_apps.json",
        timeout_s=max(run.config.serve_config(group).start_timeout_s for group in models),
    )


def _parent(run: Run, ref: ModelVersionRef) -> ModelVersionRef | None:
    parent = run.weights.manifest(ref).parent
    return None if parent is None else run.weights.ref(ref.model_group, parent)
