"""serving: model versions of a run -> policy apps that serve them, one per model group or shared base."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict

from pipelines.run.cpu_threads import engine_threads
from pipelines.run.kept_weights import DEPLOYED_FILE, STATE_FILE
from pipelines.run.run import Run
from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.policy.app_list import deployed_apps
from serve_apps.policy.deployment import PolicyAppSpec, ServedModel, ensure_apps, served_models, sync_apps
from serve_apps.policy.live_settings import wake_apps
from serve_apps.policy.proof import Limits, Proof
from serve_apps.policy.proving import Target
from stores.files import write_file
from stores.types import ModelVersionRef
from stores.weights.manifest import stored_dtype, whole_model


def app_names(run: Run, kind: str = "rollout") -> dict[str, str]:
    """Serve application of every model group; groups that are adapters of one base share it."""
    return {group: f"{run.run_id}-{kind}-{run.config.weights_name(group)}" for group in run.config.model_groups}


def capacities(run: Run, kind: str = "rollout") -> dict[str, int]:
    """By Serve application, the number of model calls that its engines sample at once, over all replicas."""
    return {app: run.config.serve_config(group).num_seqs for group, app in app_names(run, kind).items()}


def serve(
    run: Run, models: Mapping[str, ModelVersionRef], *, kind: str = "rollout", always_prove: bool = False
) -> tuple[list[Proof], float]:
    """Makes every replica of a set serve `models`: starts apps that are missing, swaps weights in place where they differ.

    Returns the proofs (empty where everything was served already and `always_prove` is off) and the seconds of the swap.
    Raises SyncError where a replica fails its proof.
    """
    start(run, models, kind=kind)
    apps = app_names(run, kind)
    if run.config.pool == "shared":  # a process that was killed in stage train left them asleep
        wake_apps(apps.values(), timeout_s=_start_timeout_s(run, models))
    by_group = served_models({group: apps[group] for group in models})
    served = {group: set(by_replica.values()) for group, by_replica in by_group.items()}
    if not always_prove and all(served[group] == {(r.version, r.manifest_sha256)} for group, r in models.items()):
        return [], 0.0
    began = time.perf_counter()
    proofs = sync_apps(
        [
            Target(
                app=apps[group],
                model=ref,
                before=_version_before(run, ref, served[group]),
                limits=proof_limits(run, group),
            )
            for group, ref in models.items()
        ],
        run.weights,
        timeout_s=run.config.sync.timeout_s,
    )
    return proofs, time.perf_counter() - began


def start(run: Run, models: Mapping[str, ModelVersionRef], *, kind: str = "rollout") -> None:
    """Deploys the policy apps of a set and waits until they answer; those that run stay as they are."""
    ensure_apps(
        app_specs(run, models, app_names(run, kind)),
        state_file=f"{run.folder}/{STATE_FILE}",
        timeout_s=_start_timeout_s(run, models),
    )
    # The list of apps is the cluster's, and lies with the run that was first there: what is needed here is kept here, too.
    deployed = {"apps": deployed_apps(), "next": {group: asdict(ref) for group, ref in models.items()}}
    write_file(f"{run.folder}/{DEPLOYED_FILE}", json.dumps(deployed, indent=1).encode())


def _start_timeout_s(run: Run, models: Iterable[str]) -> float:
    return max(run.config.serve_config(group).start_timeout_s for group in models)


def app_specs(run: Run, models: Mapping[str, ModelVersionRef], apps: Mapping[str, str]) -> list[PolicyAppSpec]:
    """One app for every model group, or for every base whose adapters the groups are."""
    bases = run.config.bases
    specs = []
    for name in dict.fromkeys(apps.values()):
        groups = [group for group, app in apps.items() if app == name]
        weights, first = run.config.weights_name(groups[0]), models[groups[0]]
        adapters = {group: models[group] for group in groups} if weights in bases else {}
        loras = [lora for group in adapters if (lora := run.config.train_config(group).lora) is not None]
        room = AdapterRoom(
            model_groups=tuple(adapters),
            max_rank=max((lora.rank for lora in loras), default=0),
            target_modules=tuple(sorted({module for lora in loras for module in lora.target_modules})),
        )
        specs.append(
            PolicyAppSpec(
                name=name,
                model_group=weights,
                model=whole_model(first),
                serve=_serve_settings(run, groups[0]),
                adapters=adapters,
                room=room if adapters else None,
                threads=engine_threads(run, groups[0]),
            )
        )
    return specs


def proof_limits(run: Run, group: str) -> Limits:
    """Returns what a proof of a model group's versions allows: as configured, else as measured for the two dtypes."""
    is_bf16 = run.config.train_config(group).deepspeed.bf16
    return run.config.sync.limits(trainer="bfloat16" if is_bf16 else "float32", engine=engine_dtype(run, group))


def engine_dtype(run: Run, group: str) -> str:
    """Returns `serve.dtype` of a model group; for `auto` the dtype in which version 0 stores most of its weights.

    vLLM would take the dtype of the version that an engine happens to start with, and bfloat16 for one of float32.
    """
    dtype = run.config.serve_config(group).dtype
    if dtype != "auto":
        return dtype
    first = run.weights.ref(run.config.weights_name(group), 0)
    stored = None if first is None else stored_dtype(run.weights.manifest(first).tensors)
    return stored if stored in ("float32", "bfloat16", "float16") else dtype


def _serve_settings(run: Run, model_group: str) -> ServeConfig:
    """The settings of the group's engines; those that lend their GPU to trainers are started so that they can sleep."""
    settings = run.config.serve_config(model_group).model_copy(update={"dtype": engine_dtype(run, model_group)})
    if run.config.pool == "separate" or settings.gpus == 0 or settings.engine_kind == "transformers":
        return settings  # the engine of transformers can always sleep
    return settings.model_copy(update={"engine": settings.engine | {"enable_sleep_mode": True}})


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
