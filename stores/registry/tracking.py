"""tracking: shows params, metrics and files of a run in MLflow.

There is one MLflow run per Troupe run, with the curves over its iterations, and nested under it one per iteration. Both are
found by their tags after a restart. Nothing is read back: the journal and the trace store are the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from stores.files import read_file
from stores.registry.experiment import (
    ITERATION_TAG,
    PARENT_TAG,
    absolute,
    connect,
    find_child,
    mlflow_names,
    open_experiment,
    open_run,
    run_url,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

MAX_PARAM_LENGTH = 6000
BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""MLflow accepts so many entries in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowRef:
    """A pointer to an MLflow run, for other systems."""

    mlflow_run_id: str
    mlflow_url: str
    """Empty where there is neither a server nor TROUPE_MLFLOW_URL."""


class RunTracker:
    """Shows one run in MLflow. It is cheap to create and to pickle: MLflow is imported and called when first needed."""

    def __init__(self, tracking_uri: str, artifact_root: str, run_id: str) -> None:
        """Args: tracking_uri: `sqlite:///PATH` or a server; artifact_root: folder or URI; run_id: Troupe's run."""
        self.tracking_uri, self.artifact_root = absolute(tracking_uri), absolute(artifact_root)
        self.run_id = run_id
        self._ids: tuple[str, str] | None = None

    @property
    def mlflow_run_id(self) -> str:
        """Returns the id of the MLflow run, created if there is none."""
        return self._open()[1]

    def start(self, params: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None) -> str:
        """Creates or reopens the MLflow run and returns its id.

        MLflow's params cannot change: those of the first start stay, and new ones are added.
        """
        run = self._client.get_run(self.mlflow_run_id)
        if run.info.status != "RUNNING":
            self._client.update_run(self.mlflow_run_id, status="RUNNING")
        old = run.data.params
        named = {name: str(value)[:MAX_PARAM_LENGTH] for name, value in mlflow_names(params or {}).items()}
        new = {name: value for name, value in named.items() if name not in old}
        from mlflow.entities import Param, RunTag

        self._log(
            self.mlflow_run_id,
            params=[Param(n, v) for n, v in new.items()],
            tags=[RunTag(n, v) for n, v in mlflow_names(tags or {}).items()],
        )
        return self.mlflow_run_id

    def log_metrics(self, values: Mapping[str, float], iteration: int, *, at: float | None = None) -> None:
        """Logs metrics named `stage/name` with the iteration as their step; the same `at` (Unix seconds) counts once."""
        self._log(self.mlflow_run_id, metrics=_metrics(values, iteration, time.time() if at is None else at))

    def log_iteration(
        self,
        iteration: int,
        *,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        started_at: float,
        ended_at: float,
    ) -> MlflowRef:
        """Shows one iteration: an MLflow run nested under this one, and a point on each curve of this one.

        A repeated call finds that run and adds nothing twice: MLflow keeps one of two metrics with the same name, step,
        value and time, and their time is `ended_at`.

        Args:
            tags: versions, links; `mlflow.note.content` is the description at the top of the page (Markdown).
            started_at, ended_at: Unix seconds of the iteration.
        """
        from mlflow.entities import RunTag

        experiment, parent = self._open()
        child = find_child(self._client, experiment, parent, iteration)
        if child is None:
            child_tags = {PARENT_TAG: parent, ITERATION_TAG: str(iteration), "troupe.run": self.run_id}
            created = self._client.create_run(
                experiment, int(started_at * 1000), tags=child_tags, run_name=f"{self.run_id} iteration {iteration}"
            )
            child = created.info.run_id
        known = self._client.get_run(child).data.metrics
        points = _metrics({n: v for n, v in mlflow_names(metrics).items() if known.get(n) != v}, iteration, ended_at)
        self._log(parent, metrics=points)
        self._log(child, metrics=points, tags=[RunTag(n, v) for n, v in mlflow_names(tags).items()])
        self._client.set_terminated(child, "FINISHED", int(ended_at * 1000))
        return MlflowRef(mlflow_run_id=child, mlflow_url=run_url(self.tracking_uri, experiment, child))

    def log_file(self, location: str) -> None:
        """Logs a text file, given as a path or URI; ValueError if it does not exist."""
        data = read_file(location)
        if data is None:
            raise ValueError(f"{location} does not exist: write it before it is shown")
        self._client.log_text(self.mlflow_run_id, data.decode(), location.rpartition("/")[2])

    def log_dict(self, name: str, content: Mapping[str, Any]) -> None:
        """Logs a small file of JSON or, where the name ends so, YAML; it replaces the one of this name."""
        self._client.log_dict(self.mlflow_run_id, dict(content), name)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """Ends the MLflow run; `start` opens it again."""
        self._client.set_terminated(self.mlflow_run_id, status)

    @property
    def _client(self) -> MlflowClient:
        return connect(self.tracking_uri)

    def _open(self) -> tuple[str, str]:
        """Returns the ids of experiment and MLflow run; they are looked up once."""
        if self._ids is None:
            experiment = open_experiment(self._client, self.artifact_root)
            self._ids = experiment, open_run(self._client, experiment, self.run_id)
        return self._ids

    def _log(self, mlflow_run: str, **entries: list[Any]) -> None:
        """Logs entries in as few calls as MLflow's limits allow."""
        rest = {kind: iter(values) for kind, values in entries.items()}
        while True:
            batch: dict[str, Any] = {kind: list(islice(values, BATCH[kind])) for kind, values in rest.items()}
            if not any(batch.values()):
                return
            self._client.log_batch(mlflow_run, **batch)


def _metrics(values: Mapping[str, float], iteration: int, at: float) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(name, float(value), int(at * 1000), iteration) for name, value in mlflow_names(values).items()]
