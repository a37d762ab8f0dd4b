"""app_list: the desired list of Serve applications, in one place, changed by compare-and-swap.

Serve's declarative API replaces the whole list of applications with each deploy, so two writers that each know only
their own applications would remove each other's. The list therefore lives in one detached actor, which deploys every
accepted change itself, one after another, and writes it to a file so that it survives the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from stores.files import is_uri, local_path, read_file, write_file
from stores.inside_ray import dashboard_address, deploy_applications
from stores.journal.waiting import waiting
from stores.resources import ON_HEAD
from stores.urls import ask_directly

NAMESPACE = "troupe"
ACTOR_NAME = "app_list"
ANSWER_TIMEOUT_S = 100.0
"""How long the actor may take to answer: it may have to start Serve first."""

Apps = dict[str, dict[str, Any]]
"""Application name -> its entry in Serve's config (`ServeApplicationSchema`), JSON values only."""


class AppList:
    """Holds the list and its revision number; the methods run one at a time."""

    def __init__(self, path: str) -> None:
        """Starts from what the file or URI holds, if it exists; nothing is deployed before the first change."""
        self._path = path
        stored = read_file(path)
        state: dict[str, Any] = {"revision": 0, "apps": {}} if stored is None else json.loads(stored)
        self._revision: int = state["revision"]
        self._apps: Apps = state["apps"]

    def read(self) -> tuple[int, Apps]:
        """Returns the revision and the list, as last deployed."""
        return self._revision, self._apps

    def replace(self, revision: int, apps: Apps) -> bool:
        """Deploys `apps` and makes them the list, if nobody changed it since `revision`; False if somebody did.

        Raises RuntimeError with Serve's message if Serve refuses the list, which then stays as it was.
        """
        if revision != self._revision:
            return False
        self._deploy(apps)  # first: a list that Serve refuses must not become the one that others change
        content = json.dumps({"revision": revision + 1, "apps": apps}, indent=1)
        write_file(self._path, content.encode())  # before it counts as done: else nobody who tries again would write it
        self._revision, self._apps = revision + 1, apps
        return True

    def _deploy(self, apps: Apps) -> None:
        url = dashboard_url()
        ask_directly(url)
        deploy_applications(url, apps.values())


def dashboard_url() -> str:
    """Returns the address of the dashboard of the cluster that this process is connected to; ValueError if it has none."""
    address = dashboard_address()
    if not address:
        raise ValueError("this Ray cluster runs without a dashboard: start it with include_dashboard=True")
    return f"http://{address}"


def open_list(path: str | Path | None = None) -> Any:
    """Returns a handle to the cluster's list. Where there is none yet `path`, a file or URI, creates it.

    Raises ValueError where there is neither a list nor a path.
    """
    if path is None:
        try:
            return ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        except ValueError:
            raise ValueError("no policy app has been deployed on this cluster: call ensure_apps first") from None
    return (
        ray.remote(AppList)
        .options(
            name=ACTOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=ON_HEAD,
            max_restarts=-1,
            max_task_retries=2,
        )
        .remote(str(path) if is_uri(str(path)) else str(local_path(str(path))))
    )


def change(app_list: Any, edit: Callable[[Apps], Apps], *, is_forced: bool = False) -> Apps:
    """Applies `edit` to the list until no other writer interferes.

    Deploys only if that changed something, or `is_forced`.
    """
    while True:
        with waiting(f"the actor {ACTOR_NAME} and Serve's controller behind it"):
            revision, apps = ray.get(app_list.read.remote(), timeout=ANSWER_TIMEOUT_S)
        edited = edit(dict(apps))
        if edited == apps and not is_forced:
            return edited
        with waiting(f"the actor {ACTOR_NAME} and Serve's controller behind it"):
            if ray.get(app_list.replace.remote(revision, edited), timeout=ANSWER_TIMEOUT_S):
                return edited


def deployed_apps() -> Apps:
    """Returns the list as last deployed; ValueError where this cluster has none."""
    with waiting(f"the actor {ACTOR_NAME}"):
        _, apps = ray.get(open_list().read.remote(), timeout=ANSWER_TIMEOUT_S)
    return dict(apps)


def num_replicas(entry: Mapping[str, Any]) -> int:
    """Returns how many replicas a policy app should have."""
    count: int = entry["args"]["serve"]["num_replicas"]
    return count


def new_entry(
    name: str, *, import_path: str, args: Mapping[str, Any], deployment: str, user_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns an application of a Serve config (`ServeApplicationSchema`) with one deployment and no route.

    JSON values only.
    """
    return {
        "name": name,
        "route_prefix": None,
        "import_path": import_path,
        "args": dict(args),
        "deployments": [{"name": deployment, "user_config": dict(user_config)}],
    }


def with_user_config(entry: Mapping[str, Any], user_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `entry` with another `user_config` of its one deployment: the only change that leaves replicas running."""
    (deployment,) = entry["deployments"]
    return {**entry, "deployments": [{**deployment, "user_config": dict(user_config)}]}
