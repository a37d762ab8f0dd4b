"""experiment: MLflow's address -> its client, Troupe's experiment in it, and the MLflow run of a Troupe run.

Every address is explicit: MLflow's own defaults lie under the current folder, which differs between Ray workers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "troupe"
RUN_TAG = "troupe.run_id"
"""Of the MLflow run that keeps a whole Troupe run."""
ITERATION_TAG = "troupe.iteration"
PARENT_TAG = "mlflow.parentRunId"
NO_ANSWER = re.compile(r"^API request to \S+ failed with (timeout )?exception", re.IGNORECASE)
"""How the client's message begins where no server said anything."""


class RegistryUnreachable(ConnectionError):
    """MLflow does not answer. Whoever answers people needs it for nothing."""


def absolute(uri: str) -> str:
    """A SQLite URL or a folder, independent of the current folder; other URIs as they are."""
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri if re.match(r"[a-z][a-z0-9+-]+:", uri) else Path(uri).absolute().as_uri()


@cache
def connect(tracking_uri: str) -> MlflowClient:
    """The client of an MLflow store or server; a SQLite store is made if there is none (10 s).

    Raises RegistryUnreachable for a server that does not answer.
    """
    # MLflow's own defaults try a server that does not answer for several minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    # It logs with a traceback what it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    with _alone(tracking_uri):
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        try:
            client.search_experiments(max_results=1)
        except MlflowException as error:
            if not NO_ANSWER.search(str(error)):
                raise
            raise RegistryUnreachable(
                f"MLflow at {tracking_uri} (storage.mlflow) does not answer: no team can be looked up, promoted or rolled "
                "back until it does; teams behind the gateway go on answering"
            ) from error
    return client


def open_experiment(client: MlflowClient, artifact_root: str) -> str:
    """Id of Troupe's experiment, made if there is none; its artifacts lie under `artifact_root`."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        try:
            return client.create_experiment(EXPERIMENT, artifact_location=absolute(artifact_root))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return experiment.experiment_id


def find_run(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    """Id of the MLflow run that keeps the Troupe run `run_id`; None if there is none."""
    quoted = run_id.replace("'", "''")
    found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{quoted}'", order_by=["attributes.start_time"])
    return found[0].info.run_id if found else None


def open_run(client: MlflowClient, experiment_id: str, run_id: str) -> str:
    """Id of the MLflow run that keeps the Troupe run `run_id`, made if there is none."""
    existing = find_run(client, experiment_id, run_id)
    if existing is not None:
        return existing
    return client.create_run(experiment_id, tags={RUN_TAG: run_id}, run_name=run_id).info.run_id


def find_child(client: MlflowClient, experiment_id: str, parent: str, iteration: int) -> str | None:
    """Id of the MLflow run of one iteration, nested under the MLflow run `parent`; None if there is none."""
    wanted = f"tags.`{PARENT_TAG}` = '{parent}' AND tags.`{ITERATION_TAG}` = '{iteration}'"
    found = client.search_runs([experiment_id], wanted, order_by=["attributes.start_time"])
    return found[0].info.run_id if found else None


def run_url(tracking_uri: str, experiment_id: str, mlflow_run_id: str) -> str:
    """Where a browser shows an MLflow run: below TROUPE_MLFLOW_URL, else below the server's address; empty where the
    store is a database and the variable is not set."""
    server = tracking_uri if tracking_uri.startswith(("http://", "https://")) else ""
    base = os.environ.get("TROUPE_MLFLOW_URL") or server
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{mlflow_run_id}" if base else ""


def numbers(values: Mapping[str, Any], place: str = "") -> dict[str, float]:
    """The numbers in nested mappings, named by their path with slashes: what MLflow calls metrics."""
    found: dict[str, float] = {}
    for name, value in values.items():
        path = f"{place}/{name}" if place else str(name)
        if isinstance(value, Mapping):
            found |= numbers(value, path)
        elif isinstance(value, int | float):
            found[path] = float(value)
    return found


@contextmanager
def _alone(tracking_uri: str) -> Iterator[None]:
    """One process at a time makes the tables of a SQLite store."""
    if not tracking_uri.startswith("sqlite:///"):
        yield
        return
    path = Path(tracking_uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
