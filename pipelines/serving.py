"""serving: which policy app serves which model group of a run, and getting it to serve given versions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set

from pipelines.run import Run
from serve_apps.deployment import PolicyAppSpec, Proof, ServedModel, ensure_apps, served_models, sync_apps
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
    served = {app: set(by_replica.values()) for app, by_replica in served_models(wanted).items()}
    if not always_prove and all(served[app] == {(r.version, r.manifest_sha256)} for app, r in wanted.items()):
        return [], 0.0
    began = time.perf_counter()
    settings = run.config.sync
    proofs = sync_apps(
        {app: (ref, _version_before(run, ref, served[app])) for app, ref in wanted.items()},
        run.weights,
        tolerance=settings.proof_tolerance,
        noise=settings.noise,
        timeout_s=settings.timeout_s,
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


def _version_before(run: Run, ref: ModelVersionRef, served: Set[ServedModel]) -> ModelVersionRef | None:
    """What a proof tells `ref` apart from: another version that a replica serves now, or else the parent.

    What is no more in the store has no probe to compare with, and is passed over.
    """
    for version, manifest_sha256 in sorted(served - {(ref.version, ref.manifest_sha256)}, reverse=True):
        before = run.weights.ref(ref.model_group, version)
        if before is not None and before.manifest_sha256 == manifest_sha256:
            return before
    parent = run.weights.manifest(ref).parent
    return None if parent is None else run.weights.ref(ref.model_group, parent)
