"""deployment: specs and model versions -> policy apps that run, serve those versions, and have proven it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_apps.adapters import AdapterRoom
from serve_apps.app_list import Apps, change, open_list, with_user_config
from serve_apps.config import ServeConfig
from serve_apps.policy_app import DEPLOYMENT, PolicyArgs
from serve_apps.proof import Proof, SyncError, SyncTimeoutError, Verdict, judge, telling
from stores.manifest import Probe, read_manifest
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

ServedModel = tuple[int, str]
"""Version and sha256 of its manifest: a run that is begun again counts its versions from 0, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an app should serve a model group with; an app whose groups are adapters of one base has a target for each."""

    app: str
    model: ModelVersionRef
    before: ModelVersionRef | None = None
    """What it must be told apart from; None: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAppSpec:
    """One policy app as it should run."""

    name: str
    model_group: str
    """Or the base that several share."""
    model: ModelVersionRef
    """What a new app starts with; an app that runs already keeps its version (that is for `sync_apps`), not its base."""
    serve: ServeConfig
    adapters: Mapping[str, ModelVersionRef] = field(default_factory=dict)
    """By model group, where they are adapters of `model`: what a new app starts with, too."""
    room: AdapterRoom | None = None
    """For these adapters."""

    @property
    def args(self) -> PolicyArgs:
        """What the app is built from."""
        return PolicyArgs(model_group=self.model_group, model=self.model, serve=self.serve, adapters=self.room)


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
    targets: Sequence[Target], weights: WeightStore, *, tolerance: float, noise: float, timeout_s: float
) -> list[Proof]:
    """Makes every replica of every app serve its targets, in place and in one deploy, and proves each replica.

    Running it again for versions that are served already only proves them again; for one that a replica refused, as it
    does where storage fails it, the replica tries again.

    Raises:
        ValueError: a manifest or a file is damaged; nothing was published.
        SyncError: a replica refused the weights, did not take them in `timeout_s`, or failed its proof.
    """
    started = time.monotonic()
    for target in targets:
        weights.verify(target.model)
    apps = change(open_list(), lambda apps: _retargeted(apps, targets))
    _repeat_refused(targets, timeout_s)
    _wait_until_served(targets, apps, started + timeout_s, timeout_s)
    return prove_apps(targets, weights, tolerance=tolerance, noise=noise, started=started)


def prove_apps(
    targets: Sequence[Target],
    weights: WeightStore,
    *,
    tolerance: float,
    noise: float,
    started: float | None = None,
) -> list[Proof]:
    """Asks every replica of every app for the versions it serves and their logprobs on the targets' probe sequences.

    All model groups of an app are asked in one call, which the engine computes as one batch.
    Raises SyncError, naming replica, model group, version and numbers, if a replica is not proven; changes nothing.
    """
    since = time.monotonic() if started is None else started
    probes = {target: _probes(target, weights) for target in targets}
    pending = []
    for app in dict.fromkeys(target.app for target in targets):
        asked = [target for target in targets if target.app == app]
        sequences = {target.model.model_group: _probe_sequences(*probes[target]) for target in asked}
        pending.append((app, asked, _handle(app).broadcast("probe", sequences)))
    proofs = []
    for app, asked, broadcast in pending:
        with waiting(f"replicas of {app} to prove {_versions(asked)}"):
            answers = broadcast.results(timeout_s=REPLICA_TIMEOUT_S)
        for statuses, logprobs in answers:
            for target in asked:
                (status,) = (s for s in statuses if s["model_group"] == target.model.model_group)
                judged = _judged(logprobs[target.model.model_group], *probes[target], tolerance=tolerance, noise=noise)
                proofs.append(_proof(target, status, judged, seconds=time.monotonic() - since))
    _raise_for_failures(proofs, targets, tolerance, noise)
    return proofs


def _judged(
    logprobs: list[list[float]], new: Probe, old: Probe | None, *, tolerance: float, noise: float
) -> tuple[Verdict, float, float | None]:
    on_old = logprobs[len(new.sequences) :] or logprobs if old else None
    return judge(
        logprobs[: len(new.sequences)],
        new.logprobs,
        on_old,
        old.logprobs if old else None,
        tolerance=tolerance,
        noise=noise,
    )


def _proof(
    target: Target, status: Mapping[str, Any], judged: tuple[Verdict, float, float | None], *, seconds: float
) -> Proof:
    verdict, to_new, to_old = judged
    return Proof(
        app=target.app,
        model_group=target.model.model_group,
        replica_id=status["replica_id"],
        pid=status["pid"],
        version=status["version"],
        max_difference_new=to_new,
        max_difference_old=to_old,
        verdict=verdict if _serves(status, target.model) else "failed",
        seconds=seconds,
    )


def served_models(apps: Mapping[str, str]) -> dict[str, dict[str, ServedModel]]:
    """{model group: {replica_id: model}} of every replica that answers. Args: apps: the app of every model group."""
    statuses = {app: _statuses_if_up(app) for app in set(apps.values())}
    return {
        group: {
            s["replica_id"]: (s["version"], s["manifest_sha256"])
            for s in statuses[app]
            if s["model_group"] == group and s["version"] is not None
        }
        for group, app in apps.items()
    }


def replica_statuses(app: str) -> list[dict[str, Any]]:
    """What every running replica says of every model group that it serves: `Policy.statuses()`."""
    answers = _handle(app).broadcast("statuses").results(timeout_s=REPLICA_TIMEOUT_S)
    return [status for statuses in answers for status in statuses]


def user_config(ref: ModelVersionRef) -> dict[str, Any]:
    """What `Policy.reconfigure` takes."""
    return {"version": ref.version, "uri": ref.uri, "manifest_sha256": ref.manifest_sha256}


def app_entry(spec: PolicyAppSpec) -> dict[str, Any]:
    """One application of a Serve config (`ServeApplicationSchema`), JSON values only."""
    adapters = {group: user_config(ref) for group, ref in spec.adapters.items()}
    wanted = {"adapters": adapters} if adapters else user_config(spec.model)
    return {
        "name": spec.name,
        "route_prefix": None,
        "import_path": IMPORT_PATH,
        "args": spec.args.to_dict(),
        "deployments": [{"name": DEPLOYMENT, "user_config": wanted}],
    }


def _is_same(entry: Mapping[str, Any] | None, spec: PolicyAppSpec) -> bool:
    """True if `entry` differs from `spec` at most in the version, which never justifies a restart; a base does.

    Unless that version was removed or replaced: a replica that is started again loads it first, and could not.
    """
    if entry is None:
        return False
    running = PolicyArgs.from_dict(entry["args"])
    wanted = spec.args if spec.adapters else replace(spec.args, model=running.model)
    return running == wanted and _is_stored(running.model)


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


def _retargeted(apps: Apps, targets: Sequence[Target]) -> Apps:
    unknown = sorted({target.app for target in targets} - apps.keys())
    if unknown:
        raise ValueError(f"apps {unknown} are not deployed; deployed are {sorted(apps)}")
    apps = dict(apps)
    for target in targets:
        wanted = user_config(target.model)
        adapters = apps[target.app]["deployments"][0]["user_config"].get("adapters")
        if adapters is not None:
            wanted = {"adapters": {**adapters, target.model.model_group: wanted}}
        apps[target.app] = with_user_config(apps[target.app], wanted)
    return apps


def _repeat_refused(targets: Sequence[Target], timeout_s: float) -> None:
    """Has replicas take the targets that they refused: Serve tells them of changes only, and this is none any more."""
    for app in dict.fromkeys(target.app for target in targets):
        asked = [target for target in targets if target.app == app]
        if any(_refuses(status, target.model) for status in _statuses_if_up(app) for target in asked):
            with waiting(f"replicas of {app} to try {_versions(asked)} again"):
                _handle(app).broadcast("retry").results(timeout_s=timeout_s, return_exceptions=True)


def _wait_until_served(targets: Sequence[Target], apps: Apps, deadline: float, timeout_s: float) -> None:
    """Returns when every replica of every app reports its targets; raises SyncError for a refusal or the deadline."""
    waiting_for, look_at = list(targets), time.monotonic() + LOOK_S
    while True:
        report = {app: _statuses_if_up(app) for app in {target.app for target in waiting_for}}
        for target in list(waiting_for):
            statuses = [s for s in report[target.app] if s["model_group"] == target.model.model_group]
            for s in statuses:
                if _refuses(s, target.model):
                    raise SyncError(
                        f"app {target.app!r}, replica {s['replica_id']}, model group {s['model_group']!r} refused version "
                        f"{target.model.version} and keeps {s['version']}: {s['error']}"
                    )
            num_right = sum(_serves(s, target.model) for s in statuses)
            if num_right == len(statuses) == apps[target.app]["args"]["serve"]["num_replicas"]:
                waiting_for.remove(target)
        if not waiting_for:
            return
        if time.monotonic() > deadline:
            seen = {app: [(s["replica_id"], s["model_group"], s["version"]) for s in report[app]] for app in report}
            raise SyncTimeoutError(
                f"after {timeout_s:g} s (sync.timeout_s) {_versions(waiting_for)} are not served: {seen}"
            )
        if time.monotonic() > look_at:
            _deploy_again({target.app for target in waiting_for})
            look_at = time.monotonic() + LOOK_S
        with waiting(f"replicas to take {_versions(waiting_for)}"):
            time.sleep(POLL_S)


def _versions(targets: Iterable[Target]) -> str:
    return ", ".join(f"{target.model.model_group}@{target.model.version}" for target in targets)


def _statuses_if_up(app: str) -> list[dict[str, Any]]:
    """Statuses of the replicas that answer; a replica that is being replaced is simply not there yet."""
    try:
        answers = _handle(app).broadcast("statuses").results(timeout_s=REPLICA_TIMEOUT_S, return_exceptions=True)
    except (RayError, RayServeException):
        return []
    return [status for statuses in answers if isinstance(statuses, list) for status in statuses]


def _serves(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    return (status["version"], status["manifest_sha256"]) == (ref.version, ref.manifest_sha256)


def _refuses(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    """Whether a replica says of this version of its group that it does not take it."""
    wanted = status["model_group"], status["wanted_sha256"]
    return status["state"] == "bad" and wanted == (ref.model_group, ref.manifest_sha256)


def _handle(app: str) -> Any:
    return serve.get_app_handle(app)


def _probes(target: Target, weights: WeightStore) -> tuple[Probe, Probe | None]:
    """What the target is recognised by, and what it is told apart from.

    Of an adapter it is one sequence: all adapters of an app are proven at once, and reading one sequence that tells well
    proves as much as reading several that do not.
    """
    manifest = weights.manifest(target.model)
    new, old = manifest.probe, weights.manifest(target.before).probe if target.before else None
    if manifest.base is None or (old is not None and old.sequences != new.sequences):
        return new, old
    base = weights.manifest(manifest.base).probe
    others = [other.logprobs for other in (old, base) if other is not None and other.sequences == new.sequences]
    best = telling(new.logprobs, others)
    return _only(new, best), None if old is None else _only(old, best)


def _only(probe: Probe, index: int) -> Probe:
    return Probe(sequences=(probe.sequences[index],), logprobs=(probe.logprobs[index],))


def _probe_sequences(new: Probe, old: Probe | None) -> list[list[int]]:
    """The new version's probe sequences, then the old one's if they are others."""
    more = () if old is None or old.sequences == new.sequences else old.sequences
    return [list(sequence) for sequence in (*new.sequences, *more)]


def _raise_for_failures(proofs: Sequence[Proof], targets: Sequence[Target], tolerance: float, noise: float) -> None:
    failed = [p for p in proofs if p.verdict == "failed"]
    if not failed:
        return
    wanted = {(target.app, target.model.model_group): target.model.version for target in targets}
    lines = [
        f"app {p.app!r}, replica {p.replica_id} (pid {p.pid}), model group {p.model_group!r} should serve version "
        f"{wanted[p.app, p.model_group]}, says {p.version}; max |logprob difference| to it {p.max_difference_new:.3g} "
        + (
            f"(without another version to tell it apart from, sync.proof_noise = {noise:g} is allowed)"
            if p.max_difference_old is None
            else f"(tolerance {tolerance:g}), to the version before {p.max_difference_old:.3g}"
        )
        for p in failed
    ]
    raise SyncError("\n".join(lines), proofs)
