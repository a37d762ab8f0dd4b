"""deployment: specs and model versions -> policy apps that run, serve those versions, and have proven it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError

from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.policy.app_list import Apps, change, deployed_apps, new_entry, num_replicas, open_list, with_user_config
from serve_apps.policy.engine_sleep import CANNOT_WAKE
from serve_apps.policy.policy_app import DEPLOYMENT, PolicyArgs
from serve_apps.policy.priority import LOW_PRIORITY
from serve_apps.policy.proof import Proof, SyncError, SyncTimeoutError
from serve_apps.policy.proving import Target, prove_apps, serves, versions_of
from serve_apps.policy.replicas import Broadcast, statuses_if_up
from stores.journal.waiting import waiting
from stores.types import ModelVersionRef
from stores.weights.manifest import read_manifest
from stores.weights.store import WeightStore

logger = logging.getLogger(__name__)

IMPORT_PATH = "serve_apps.policy.policy_app:build_app"
POLL_S = 0.03
GIVEN_UP_CHECK_S = 1.0
"""How often a sync that waits checks whether Serve has given up."""

ServedModel = tuple[int, str]
"""The version and the sha256 of its manifest. The version alone is not enough: a run that is begun again counts from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAppSpec:
    """Describes one policy app as it should run."""

    name: str
    model_group: str
    """The model group that the app serves, or the base that several share."""
    model: ModelVersionRef
    """The model that a new app starts with.
    An app that runs already keeps its version (`sync_apps` changes it), not its base."""
    serve: ServeConfig
    adapters: Mapping[str, ModelVersionRef] = field(default_factory=dict)
    """The adapters that a new app starts with, by model group, where the groups are adapters of `model`."""
    room: AdapterRoom | None = None
    """The room that the engine needs for these adapters."""
    threads: int = 1
    """The CPU threads of each engine."""

    @property
    def args(self) -> PolicyArgs:
        """The arguments that the app is built from."""
        return PolicyArgs(
            model_group=self.model_group,
            model=self.model,
            serve=self.serve,
            adapters=self.room,
            threads=self.threads,
        )


def ensure_apps(specs: Sequence[PolicyAppSpec], *, state_file: str | Path, timeout_s: float) -> None:
    """Deploys the apps that are missing, configured differently or given up by Serve, and waits until all of them run.

    Args:
        specs: the apps that should run; other apps on the list stay.
        state_file: the file of the list of apps, used if this cluster has no list yet.
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


def sync_apps(targets: Sequence[Target], weights: WeightStore, *, timeout_s: float) -> list[Proof]:
    """Makes every replica of every app serve its targets, in place and in one deploy, and proves each replica.

    A second call for versions that are served already only proves them again. A replica that refused a version, for example
    because its storage failed, tries again.

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
    return prove_apps(targets, weights, started=started, timeout_s=timeout_s)


def served_models(apps: Mapping[str, str]) -> dict[str, dict[str, ServedModel]]:
    """Returns {model group: {replica_id: model}} of every replica that answers.

    Args: apps: the app of every model group.
    """
    statuses = {app: statuses_if_up(app) for app in set(apps.values())}
    return {
        group: {
            s["replica_id"]: (s["version"], s["manifest_sha256"])
            for s in statuses[app]
            if s["model_group"] == group and s["version"] is not None
        }
        for group, app in apps.items()
    }


def user_config(ref: ModelVersionRef) -> dict[str, Any]:
    """Returns what `Policy.reconfigure` takes for a whole model."""
    return {"version": ref.version, "uri": ref.uri, "manifest_sha256": ref.manifest_sha256}


def app_entry(spec: PolicyAppSpec) -> dict[str, Any]:
    """Returns the application in Serve's config, JSON values only."""
    adapters = {group: user_config(ref) for group, ref in spec.adapters.items()}
    settings = {"adapters": adapters} if adapters else user_config(spec.model)
    return new_entry(
        spec.name, import_path=IMPORT_PATH, args=spec.args.to_dict(), deployment=DEPLOYMENT, user_config=settings
    )


def _is_same(entry: Mapping[str, Any] | None, spec: PolicyAppSpec) -> bool:
    """Returns True if `entry` differs from `spec` at most in the version, for which no app is restarted, unlike for a base.

    It returns False if that version was removed or replaced: a replica that starts again loads it first, and could not. And if the
    arguments are an earlier Troupe's, which had other settings: those of a run may outlive an update.
    """
    if entry is None:
        return False
    try:
        running = PolicyArgs.from_dict(entry["args"])
        read_manifest(running.model)
    except (ValueError, TypeError):
        return False
    return running == (spec.args if spec.adapters else replace(spec.args, model=running.model))


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
            late = [name for name in names if states[name] != "RUNNING"]
            faults = [f"{name} is {states[name]}: {_message(live.get(name))}" for name in late]
            # A replica that waits for room on its GPU is being updated, in the eyes of Serve, and answers all the same.
            faults += [s[CANNOT_WAKE] for name in late for s in statuses_if_up(name) if s[CANNOT_WAKE]]
            raise TimeoutError(f"after {timeout_s:g} s (serve.start_timeout_s) {'; '.join(faults)}")
        with waiting(f"apps to start: {', '.join(name for name in names if states[name] != 'RUNNING')}"):
            time.sleep(0.1)


def _deploy_again(names: Iterable[str]) -> None:
    """Makes Serve try those of these apps again that it has given up; replicas that run go on.

    Serve gives up when two replicas in a row fail to start while a version changes, and then waits for a change of the
    deployment. One lost node is enough: until Ray notices the loss, Serve starts each replacement on that node.
    """
    live = serve.status().applications
    given_up = {name for name in names if name in live and live[name].status.value == "DEPLOY_FAILED"}
    if not given_up:
        return
    for name in sorted(given_up):
        logger.warning("app %s is deployed again: %s", name, _message(live[name]))
    change(open_list(), lambda apps: apps | {name: _changed(apps[name]) for name in given_up & apps.keys()})


def _changed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `entry` with a `user_config` that means the same and that Serve takes for a change."""
    settings = entry["deployments"][0]["user_config"]
    return with_user_config(entry, settings | {"attempt": settings.get("attempt", 0) + 1})


def _message(app: Any) -> str:
    """Returns Serve's messages about an app and its deployments."""
    if app is None:
        return "Serve does not know it"
    parts = [app.message, *(f"{name} is {d.status.value}: {d.message}" for name, d in app.deployments.items())]
    return " | ".join(_ends(part) for part in parts if part)


def _ends(message: str) -> str:
    """Returns the first line of a message and the last ones, where a traceback has its cause."""
    lines = [line for line in message.splitlines() if line.strip()]
    return "\n".join(lines if len(lines) <= 8 else [lines[0], "...", *lines[-6:]])


def _retargeted(apps: Apps, targets: Sequence[Target]) -> Apps:
    unknown = sorted({target.app for target in targets} - apps.keys())
    if unknown:
        raise ValueError(f"apps {unknown} are not deployed; deployed are {sorted(apps)}")
    apps = dict(apps)
    for target in targets:
        wanted, settings = user_config(target.model), apps[target.app]["deployments"][0]["user_config"]
        if "adapters" in settings:
            wanted = {"adapters": {**settings["adapters"], target.model.model_group: wanted}}
        priority = {LOW_PRIORITY: True} if settings.get(LOW_PRIORITY) else {}
        apps[target.app] = with_user_config(apps[target.app], wanted | priority)
    return apps


def _repeat_refused(targets: Sequence[Target], timeout_s: float) -> None:
    """Makes replicas try the targets again that they refused: Serve hands over changes only, and this is none any more."""
    for app in dict.fromkeys(target.app for target in targets):
        asked = [target for target in targets if target.app == app]
        if any(_refuses(status, target.model) for status in statuses_if_up(app) for target in asked):
            # A replica that ends over it is replaced by Serve.
            with waiting(f"replicas of {app} to try {versions_of(asked)} again"), suppress(RayError):
                Broadcast(app, "retry").answers(num_replicas(deployed_apps()[app]), timeout_s=timeout_s)


def _wait_until_served(targets: Sequence[Target], apps: Apps, deadline: float, timeout_s: float) -> None:
    """Returns when every replica of every app reports its targets; raises SyncError for a refusal or the deadline."""
    waiting_for, check_at = list(targets), time.monotonic() + GIVEN_UP_CHECK_S
    while True:
        report = {app: statuses_if_up(app) for app in {target.app for target in waiting_for}}
        for target in list(waiting_for):
            statuses = [s for s in report[target.app] if s["model_group"] == target.model.model_group]
            for s in statuses:
                if _refuses(s, target.model):
                    raise SyncError(
                        f"app {target.app!r}, replica {s['replica_id']}, model group {s['model_group']!r} refused version "
                        f"{target.model.version} and keeps {s['version']}: {s['error']}"
                    )
            num_right = sum(serves(s, target.model) for s in statuses)
            if num_right == len(statuses) == num_replicas(apps[target.app]):
                waiting_for.remove(target)
        if not waiting_for:
            return
        if time.monotonic() > deadline:
            seen = {app: [(s["replica_id"], s["model_group"], s["version"]) for s in report[app]] for app in report}
            raise SyncTimeoutError(
                f"after {timeout_s:g} s (sync.timeout_s) {versions_of(waiting_for)} are not served: {seen}"
            )
        if time.monotonic() > check_at:
            _deploy_again({target.app for target in waiting_for})
            check_at = time.monotonic() + GIVEN_UP_CHECK_S
        with waiting(f"replicas to take {versions_of(waiting_for)}"):
            time.sleep(POLL_S)


def _refuses(status: Mapping[str, Any], ref: ModelVersionRef) -> bool:
    """Returns whether a replica reports that it refused this version of its group."""
    refused = status["model_group"], status["wanted_sha256"]
    return status["state"] == "bad" and refused == (ref.model_group, ref.manifest_sha256)
