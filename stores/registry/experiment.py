"""experiment: connects to MLflow, and finds or creates Troupe's experiment and the MLflow run of a Troupe run.

Every address is explicit: MLflow's own defaults lie under the current folder, which differs between Ray workers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from stores.files import local_path
from stores.journal.sqlite import SqliteReader, absolute_sqlite, sqlite_file
from stores.store_faults import UnreadableStore, name_sqlite_faults
from stores.urls import ask_directly, is_loopback

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXPERIMENT = "troupe"
RUN_TAG = "troupe.run_id"
"""Tag of the MLflow run that keeps a whole Troupe run."""
ITERATION_TAG = "troupe.iteration"
PARENT_TAG = "mlflow.parentRunId"
MAX_NAME = 250
NOT_IN_NAMES = re.compile(r"[^\w .:-]")
CUT_PART = re.compile(r"/\.*$")
"""Matches what a cut may leave of a name's last part, and MLflow refuses."""
NO_ANSWER = re.compile(r"^API request to \S+ failed with (timeout )?exception", re.IGNORECASE)
"""Matches the client's message when no server has answered."""


class RegistryUnreachable(ConnectionError):
    """MLflow does not answer. Production traffic goes on: serving does not need it."""


def absolute(uri: str) -> str:
    """Makes a SQLite URL or a folder independent of the current folder; other URIs are returned unchanged.

    Raises ValueError for a SQLite URL with unknown options.
    """
    if uri.startswith("sqlite:///"):
        return absolute_sqlite(uri).render_as_string()
    return uri if re.match(r"[a-z][a-z0-9+-]+:", uri) else Path(uri).absolute().as_uri()


@cache
def connect(tracking_uri: str, *, is_read_only: bool = False) -> MlflowClient:
    """Returns the client of an MLflow store or server; a SQLite store is created if there is none (10 s).

    Args: is_read_only: a SQLite store is there, and nothing is written beside it.

    Raises RegistryUnreachable for a server that does not answer, UnreadableStore for a damaged SQLite store.
    """
    if is_loopback(tracking_uri):
        ask_directly()
    # MLflow's own defaults try a server that does not answer for several minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    # It logs every error with a traceback before it raises it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if file := sqlite_file(tracking_uri):
        name_sqlite_faults(sa.Engine)  # MLflow makes engines of its own
        reader = SqliteReader(file)
        if is_read_only and reader.pending and not os.access(file.parent, os.W_OK):
            raise UnreadableStore(
                f"{file} was not closed by its last writer, and MLflow cannot complete it where it lies: copy it with "
                f"{reader.pending[0].name} to a folder that can be written (storage.mlflow)"
            )
        if is_read_only or file.is_file():
            reader.check(table="alembic_version" if is_read_only else "")  # MLflow would try a damaged one for minutes
    with _alone(tracking_uri, is_read_only=is_read_only):
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
    """Returns the id of Troupe's experiment, created if there is none, restored if it was deleted; its artifacts lie under `artifact_root`.

    MLflow keeps the place of an experiment for good: where the one of this name has another, as on a server on which runs of several
    machines or buckets are shown, this root has an experiment of its own.
    """
    location = absolute(artifact_root)
    experiment = _experiment(client, EXPERIMENT, location)
    if _place(experiment.artifact_location) != _place(location):
        experiment = _experiment(client, f"{EXPERIMENT} {_place(location)}", location)
    if experiment.lifecycle_stage != "active":  # MLflow keeps its name, and takes no run for it
        logger.warning("the experiment %r was deleted in MLflow: it is restored, with its runs", experiment.name)
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def _experiment(client: MlflowClient, name: str, location: str) -> Experiment:
    """Returns the experiment of this name, created at `location` if there is none."""
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has just created it
                raise
        experiment = client.get_experiment_by_name(name)
    assert experiment is not None, f"{name} was just created"
    return experiment


def _place(location: str) -> str:
    """Returns what two spellings of one place have in common: a folder may be reached by a link."""
    location = location.rstrip("/")
    return str(local_path(location).resolve()) if location.startswith("file:///") else location


def find_run(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    """Returns the id of the MLflow run that keeps the Troupe run `run_id`; None if there is none."""
    quoted = run_id.replace("'", "''")
    runs = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{quoted}'", order_by=["attributes.start_time"])
    return runs[0].info.run_id if runs else None


def open_run(client: MlflowClient, experiment_id: str, run_id: str) -> str:
    """Returns the id of the MLflow run that keeps the Troupe run `run_id`, created if there is none.

    Of two processes that look at once each makes one, and the second is never found again: whoever may be the first has a lock.
    """
    existing = find_run(client, experiment_id, run_id)
    if existing is not None:
        return existing
    return client.create_run(experiment_id, tags={RUN_TAG: run_id}, run_name=run_id).info.run_id


def find_child(client: MlflowClient, experiment_id: str, parent: str, iteration: int) -> str | None:
    """Returns the id of the MLflow run of one iteration, nested under the MLflow run `parent`; None if there is none."""
    of_iteration = f"tags.`{PARENT_TAG}` = '{parent}' AND tags.`{ITERATION_TAG}` = '{iteration}'"
    runs = client.search_runs([experiment_id], of_iteration, order_by=["attributes.start_time"])
    return runs[0].info.run_id if runs else None


def run_url(tracking_uri: str, experiment_id: str, mlflow_run_id: str) -> str:
    """Returns where a browser shows an MLflow run: below TROUPE_MLFLOW_URL, or else below the server's address.

    It is empty where the store is a database and the variable is not set.
    """
    server = tracking_uri if tracking_uri.startswith(("http://", "https://")) else ""
    base = os.environ.get("TROUPE_MLFLOW_URL") or server
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{mlflow_run_id}" if base else ""


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the numbers in nested mappings, named by their path with slashes, as MLflow's metrics are.

    Short paths come first: where a limit cuts the rest, details go.
    """
    metrics: dict[str, float] = {}
    for name, value in values.items():
        path = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            metrics |= numbers(value, path)
        elif isinstance(value, int | float):
            metrics[path] = float(value)
    return dict(sorted(metrics.items(), key=lambda item: item[0].count("/")))


def mlflow_names(values: Mapping[str, T]) -> dict[str, T]:
    """Returns metrics, params or tags under names that MLflow takes: parts come from users, as the source of a task or a model group.

    Other characters, and parts of a path that are empty or dots, become `_`. What then has the name of an earlier one gets a number.
    """
    named: dict[str, T] = {}
    for name, value in values.items():
        parts = [NOT_IN_NAMES.sub("_", part) for part in name.split("/")]
        clean = CUT_PART.sub("", "/".join(part if part.strip(".") else "_" for part in parts)[:MAX_NAME])
        same = (f"{clean[: MAX_NAME - 5]}-{number}" for number in count(2))
        while clean in named:
            clean = next(same)
        named[clean] = value
    return named


@contextmanager
def _alone(tracking_uri: str, *, is_read_only: bool) -> Iterator[None]:
    """Lets one process at a time create the tables of a SQLite store: MLflow's own migration does not lock them."""
    path = sqlite_file(tracking_uri)
    if path is None:
        yield
        return
    lock = path.with_name(path.name + ".lock")
    if is_read_only:
        with (
            suppress(OSError),
            lock.open() as file,
        ):  # until nobody makes tables; where it cannot be opened, nobody does
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        escaped = Path(tracking_uri.removeprefix("sqlite:///")).parent
        is_made_by_mlflow = not escaped.exists()  # it makes the folder that the escaped path names, too
        yield
        if is_made_by_mlflow:
            with suppress(OSError):
                escaped.rmdir()
