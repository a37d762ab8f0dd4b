"""deployment: specs and model versions -> policy apps that run, serve those versions, and have proven it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_apps.app_list import Apps, change, open_list, with_user_config
from serve_apps.config import ServeConfig
from serve_apps.policy_app import DEPLOYMENT, PolicyArgs
from serve_apps.proof import Proof, SyncError, SyncTimeoutError, judge
from stores.manifest import Manifest, read_manifest
from stores.types import ModelVersionRef
from stores.waiting import waiting
from stores.weights import WeightStore

logger = logging.getLogger(__name__)

IMPORT_PATH = "serve_apps.policy_app:build_app"
POLL_S = 0.03
LOOK_S = 1.0
"""How often a sync that waits looks whether Serve has given up."""
REPLICA_TIMEOUT_S = 30.0
"""How long one replica may take to answer a status or a probe."""

Target = tuple[ModelVersionRef, ModelVersionRef | None]
"""The version an app should serve, and the one from which it must be told apart (None: none is known)."""

ServedModel = tuple[int, str]
"""Version and sha256 of its manifest: a run that is begun again counts its versions from 0, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAppSpec:
    """One policy app as it should run."""

    name: str
    model_group: str
    model: ModelVersionRef
    """What a new app starts with; an app that runs already keeps its version (that is for `sync_apps`)."""
    serve: ServeConfig


def ensure_apps(specs: Sequence[PolicyAppSpec], *, state_file: str | Path, timeout_s: float) -> None:
    """Deploys what is missing, configured differently or given up by Serve, side by side, and waits until all apps run.

    Args:
        specs: the apps wanted; other apps on the list stay.
        state_file: where the list of apps is kept, used if this cluster has none yet.
        timeout_s: for all of them together.

    Raises RuntimeError with the app's own message when one fails to start, TimeoutError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s

    def edit(apps: Apps) -> Apps:
        return apps | {s.name: app_entry(s) for s in specs if not _is_same(apps.get(s.name), s)}

    live = serve.status().applications
    change(open_list(state_file), edit, is_forced=any(s.name not in live for s in specs))
    _deploy_again([s.name for s in specs])
    _wait_until_running([s.name for s in specs], deadline, timeout_s)


def remove_apps(names: Iterable[str], *, timeout_s: float = 60.0) -> None:
    """Takes apps off the list and waits until they are gone; unknown names are ignored."""
    gone = set(names)
    change(open_list(), lambda apps: {name: entry for name, entry in apps.items() if name not in gone})
    deadline = time.monotonic() + timeout_s
    while left := gone & serve.status().applications.keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"apps {sorted(left)} are still there {timeout_s:g} s after their removal")
        time.sleep(POLL_S)


def sync_apps(
    targets: Mapping[str, Target], weights: WeightStore, *, tolerance: float, noise: float, timeout_s: float
) -> list[Proof]:
    """Makes every replica of every app serve its target, in place and in one deploy, and proves each replica.

    Running it again for versions that are served already only proves them again; for one that a replica refused, as it
    does where storage fails it, the replica tries again.

    Raises:
        ValueError: a manifest or a file is damaged; nothing was published.
        SyncError: a replica refused the weights, did not take them in `timeout_s`, or failed its proof.
    """
    started = time.monotonic()
    for ref, _ in targets.values():
        weights.verify(ref)
    apps = change(open_list(), lambda apps: _retargeted(apps, targets))
    _repeat_refused(targets, timeout_s)
    _wait_until_served(targets, apps, started + timeout_s, timeout_s)
    return prove_apps(targets, weights, tolerance=tolerance, noise=noise, started=started)


def prove_apps(
    targets: Mapping[str, Target],
    weights: WeightStore,
    *,
    tolerance: float,
    noise: float,
    started: float | None = None,
) -> list[Proof]:
    """Asks every replica of every app for its version and its logprobs on the probe sequences of its target.

    Raises SyncError, naming replica, version and numbers, if a replica is not proven; changes nothing.
    """
    since = time.monotonic() if started is None else started
    pending = []
    for app, (new, old) in targets.items():
        manifests = weights.manifest(new), weights.manifest(old) if old else None
        sequences, num_new = _probe_sequences(*manifests)
        pending.append((app, new, manifests, num_new, _handle(app).broadcast("probe", sequences)))
    proofs = []
    for app, new, (new_manifest, old_manifest), num_new, broadcast in pending:
        with waiting(f"replicas of {app} to prove version {new.version}"):
            answers = broadcast.results(timeout_s=REPLICA_TIMEOUT_S)
        for status, logprobs in answers:
            on_old = logprobs[num_new:] or logprobs if old_manifest else None
            verdict, to_new, to_old = judge(
                logprobs[:num_new],
                new_manifest.probe.logprobs,
                on_old,
                old_manifest.probe.logprobs if old_manifest else None,
                tolerance=tolerance,
                noise=noise,
            )
            proofs.append(
                Proof(
                    app=app,
                    replica_id=status["replica_id"],
                    pid=status["pid"],
                    version=status["version"],
                    max_difference_new=to_new,
                    max_difference_old=to_old,
                    verdict=verdict if _serves(status, new) else "failed",
                    seconds=time.monotonic() - since,
                )
            )
    _raise_for_failures(proofs, targets, tolerance, noise)
    return proofs


def served_models(app_names: Iterable[str]) -> dict[str, dict[str, ServedModel]]:
    """{app: {replica_id: model}} of every replica that answers."""
    return {
        app: {s["replica_id"]: (s["version"], s["manifest_sha256"]) for s in _statuses_if_up(app)} for app in app_names
    }


def replica_statuses(app: str) -> list[dict[str, Any]]:
    """`Policy.status()` of every running replica."""
    return list(_handle(app).broadcast("status").results(timeout_s=REPLICA_TIMEOUT_S))


def user_config(ref: ModelVersionRef) -> dict[str, Any]:
    """What `Policy.reconfigure` takes."""
    return {"version": ref.version, "uri": ref.uri, "manifest_sha256": ref.manifest_sha256}


def app_entry(spec: PolicyAppSpec) -> dict[str, Any]:
    """One application of a Serve config (`ServeApplicationSchema`), JSON values only."""
    args = PolicyArgs(model_group=spec.model_group, model=spec.model, serve=spec.serve).to_dict()
    return {
        "name": spec.name,
        "route_prefix": None,
        "import_path": IMPORT_PATH,
        "args": args,
        "deployments": [{"name": DEPLOYMENT, "user_config": user_config(spec.model)}],
    }


def _is_same(entry: Mapping[str, Any] | None, spec: PolicyAppSpec) -> bool:
    """True if `entry` differs from `spec` at most in the version, which never justifies a restart.

    Unless that version was removed or replaced: a replica that is started again loads it first, and could not.
    """
    if entry is None:
        return False
    running = PolicyArgs.from_dict(entry["args"])
    return (running.model_group, running.serve) == (spec.model_group, spec.serve) and _is_stored(running.model)


def _is_stored(ref: ModelVersionRef) -> bool:
    try:
        read_manifest(ref)
    except ValueError:
        return False
    return True


def _wait_until_running(names: Sequence[str], deadline: float, timeout_s: float) -> None:
    while True:
        live = serve.status().applications
        states = {name: live[name].status.value if name in live else "NOT_STARTED" for name in names}
        for name, state in states.items():
            if state == "DEPLOY_FAILED":
                raise RuntimeError(f"app {name!r} did not start: {_message(live[name])}")
        if all(state == "RUNNING" for state in states.values()):
            return
        if time.monotonic() > deadline:
            faults = "; ".join(f"{n} is {s}: {_message(live.get(n))}" for n, s in states.items() if s != "RUNNING")
            raise TimeoutError(f"after {timeout_s:g} s (serve.start_timeout_s) {faults}")
        with waiting(f"apps to start: {', '.join(name for name in names if states[name] != 'RUNNING')}"):
            time.sleep(0.1)


def _deploy_again(names: Iterable[str]) -> None:
    """Has Serve try those of these apps again that it has given up; replicas that run go on.

    It gives up where two replicas in a row fail to start while a version changes, and waits for a change of the deployment
    from then on. One lost node is enough: until Ray knows of the loss, Serve starts the replacement on it, and again.
    """
    live = serve.status().applications
    given_up = {name for name in names if name in live and live[name].status.value == "DEPLOY_FAILED"}
    if not given_up:
        return
    for name in sorted(given_up):
        logger.warning("app %s is deployed again: %s", name, _message(live[name]))
    change(open_list(), lambda apps: apps | {name: _changed(apps[name]) for name in given_up & apps.keys()})


def _changed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with a `user_config` that says the same and is another one for Serve."""
    settings = entry["deployments"][0]["user_config"]
    return with_user_config(entry, settings | {"attempt": settings.get("attempt", 0) + 1})


def _message(app: Any) -> str:
    """What Serve says about an app and its deployments."""
    if app is None:
        return "Serve does not know it"
    parts = [app.message, *(f"{name} is {d.status.value}: {d.message}" for name, d in app.deployments.items())]
    return " | ".join(_ends(part) for part in parts if part)


def _ends(message: str) -> str:
    """The first line of a message and the last ones, where a traceback has its cause."""
    lines = [line for line in message.splitlines() if line.strip()]
    return "\n".join(lines if len(lines) <= 8 else [lines[0], "...", *lines[-6:]])


def _retargeted(apps: Apps, targets: Mapping[str, Target]) -> Apps:
    unknown = sorted(targets.keys() - apps.keys())
    if unknown:
        raise ValueError(f"apps {unknown} are not deployed; deployed are {sorted(apps)}")
    return apps | {app: with_user_config(apps[app], user_config(ref)) for app, (ref, _) in targets.items()}


def _repeat_refused(targets: Mapping[str, Target], timeout_s: float) -> None:
    """Has replicas take the target that they refused: Serve tells them of changes only, and this is none any more."""
    for app, (ref, _) in targets.items():
        if any(_refuses(status, ref) for status in _statuses_if_up(app)):
            with waiting(f"replicas of {app} to try version {ref.version} again"):
                _handle(app).broadcast("retry").results(timeout_s=timeout_s, return_exceptions=True)


def _wait_until_served(targets: Mapping[str, Target], apps: Apps, deadline: float, timeout_s: float) -> None:
    """Returns when every replica of every app reports its target; raises SyncError for a refusal or the deadline."""
    waiting_for, look_at = dict(targets), time.monotonic() + LOOK_S
    while True:
        report = {app: _statuses_if_up(app) for app in waiting_for}
        for app, statuses in report.items():
            ref, _ = waiting_for[app]
            for s in statuses:
                if _refuses(s, ref):
                    raise SyncError(
                        f"app {app!r}, replica {s['replica_id']} refused version {ref.version} and keeps "
                        f"{s['version']}: {s['error']}"
                    )
            num_right = sum(_serves(s, ref) for s in statuses)
            if num_right == len(statuses) == apps[app]["args"]["serve"]["num_replicas"]:
                del waiting_for[app]
        if not waiting_for:
            return
        if time.monotonic() > deadline:
            seen = {app: {s["replica_id"]: s["version"] for s in report[app]} for app in waiting_for}
            wanted = {app: ref.version for app, (ref, _) in waiting_for.items()}
            raise SyncTimeoutError(f"after {timeout_s:g} s (sync.timeout_s) versions {wanted} are not served: {seen}")
        if time.monotonic() > look_at:
            _deploy_again(waiting_for)
            look_at = time.monotonic() + LOOK_S
        with waiting(f"replicas of {', '.join(waiting_for)} to take their versions"):
            time.sleep(POLL_S)


def _statuses_if_up(app: str) -> list[dict[str, Any]]:
    """Statuses of the replicas that answer; a replica that is being replaced is simply not there yet."""
    try:
        answers = _handle(app).broadcast("status").results(timeout_s=REPLICA_TIMEOUT_S, return_exceptions=True)
    except (RayError, RayServeException):
        return []
    return [a for a in answers if isinstance(a, dict)]


def _serves(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    return (status["version"], status["manifest_sha256"]) == (ref.version, ref.manifest_sha256)


def _refuses(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    return status["state"] == "bad" and status["wanted_sha256"] == ref.manifest_sha256


def _handle(app: str) -> Any:
    return serve.get_app_handle(app)


def _probe_sequences(new: Manifest, old: Manifest | None) -> tuple[list[list[int]], int]:
    """The new version's probe sequences, then the old one's if they are others; and how many are the new one's."""
    sequences = [list(s) for s in new.probe.sequences]
    if old is None or tuple(old.probe.sequences) == tuple(new.probe.sequences):
        return sequences, len(sequences)
    return sequences + [list(s) for s in old.probe.sequences], len(sequences)


def _raise_for_failures(proofs: Sequence[Proof], targets: Mapping[str, Target], tolerance: float, noise: float) -> None:
    failed = [p for p in proofs if p.verdict == "failed"]
    if not failed:
        return
    lines = [
        f"app {p.app!r}, replica {p.replica_id} (pid {p.pid}) should serve version {targets[p.app][0].version}, says "
        f"{p.version}; max |logprob difference| to it {p.max_difference_new:.3g} "
        + (
            f"(without another version to tell it apart from, sync.proof_noise = {noise:g} is allowed)"
            if p.max_difference_old is None
            else f"(tolerance {tolerance:g}), to the version before {p.max_difference_old:.3g}"
        )
        for p in failed
    ]
    raise SyncError("\n".join(lines), proofs)
