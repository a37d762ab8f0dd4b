"""config: where a run's data is stored, and for how long. Pydantic only.

Credentials are never part of it: a run config is stored, shown and sent to clusters. Object storage is found by the usual
AWS_* variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION), PostgreSQL by libpq's (PGPASSWORD
or PGPASSFILE; PGHOST, PGUSER where the URL leaves them out), an MLflow server by MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from stores.files import is_uri, local_path
from stores.settings import Settings
from stores.urls import without_secrets


def refuse_secrets(value: str) -> None:
    """Raises ValueError where a text of a run config has a URL with a password."""
    if (shown := without_secrets(value)) != value:
        raise ValueError(
            f"{shown} holds a password, and a run config is stored and shown: leave it out of the URL and give it "
            "by PGPASSWORD or PGPASSFILE (PostgreSQL), MLFLOW_TRACKING_PASSWORD, AWS_SECRET_ACCESS_KEY, or to a program by a "
            "variable that `inherit` names"
        )


class StorageConfig(Settings):
    """This section names the URIs of the stores. A store without a URI lies under `root`."""

    root: str = "runs"
    """The folder or URI under which every run has a folder of its own. Under a URI, `journal` and `mlflow` must be given,
    because SQLite needs a folder."""
    traces: str = ""
    """The LanceDB URI of the episodes. Empty: `<root>/<run>/traces`."""
    served: str = ""
    """The LanceDB URI of the captured answers of the gateway (`gateway.capture`). Empty: `<root>/<run>/served`."""
    weights: str = ""
    """The folder or pyarrow filesystem URI of the model versions. Empty: `<root>/<run>/weights`."""
    journal: str = ""
    """The SQLAlchemy URL of the journal, e.g. postgresql+psycopg://troupe@host/troupe. Empty: SQLite at
    `<root>/<run>/journal.db`. Give one where several machines run stages of the same run."""
    mlflow: str = ""
    """The URI of MLflow's tracking server and registry. Empty: SQLite at `<root>/mlflow.db`."""
    artifacts: str = ""
    """The root of MLflow's artifacts. Empty: `<root>/mlflow-artifacts`."""

    @field_validator("root", "traces", "served", "weights", "journal", "mlflow", "artifacts")
    @classmethod
    def _holds_no_secret(cls, value: str) -> str:
        refuse_secrets(value)
        return value

    @field_validator("root", "traces", "served", "weights", "artifacts")
    @classmethod
    def _is_a_plain_uri(cls, value: str) -> str:
        if "://" in value and urlsplit(value).query:
            raise ValueError(f"{value} has options after '?': give the endpoint by AWS_ENDPOINT_URL instead")
        if "://" in value and "#" in value:
            raise ValueError(f"{value} has a '#', at which the path of a URI ends: choose another name")
        if not is_uri(value):
            local_path(value)
        return value

    @model_validator(mode="after")
    def _databases_have_a_place(self) -> Self:
        if "://" in self.root and not self.root.startswith("file://"):
            for name in ("journal", "mlflow"):
                if not getattr(self, name):
                    raise ValueError(
                        f"root = {self.root} is no folder, and SQLite needs one: give {name} as a URL of its own"
                    )
        return self


class MaintainConfig(Settings):
    """This section sets what `troupe maintain` keeps, and which weights and checkpoints go at the end of each iteration. It
    never removes episodes or rewards, only data that repeats them."""

    weights_limit_gb: float | None = Field(20.0, ge=0)
    """The size in GB of a run's weights and checkpoints above which, at the end of each iteration, those go that nothing
    needs, the oldest first. What is needed stays, whatever its size. null: only `troupe maintain` removes any."""
    keep_versions: int = Field(1, ge=1)
    """The number of newest versions of each model group that stay when an iteration ends above `weights_limit_gb`, the last
    two at most with their checkpoints. Version 0, champions, teams with an alias and what engines serve stay in any case."""
    keep_iterations: int = Field(5, ge=1)
    """The number of newest finished iterations that `troupe maintain` leaves as they are: table versions, weights and
    checkpoints."""
    keep_champions: int = Field(2, ge=1)
    """The number of champions, the present one included, whose weights stay, so that you can roll back to them. The weights
    of every alias stay in any case."""
    leftover_hours: float = Field(24, gt=0)
    """The age in hours from which files of a killed process are removed: files that no manifest and no stage names."""
    reader_grace_s: float = Field(600, ge=0)
    """The time in seconds for which files that a maintenance replaced stay for their readers. A maintenance that begins
    after this time removes them."""
