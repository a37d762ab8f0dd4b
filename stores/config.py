"""Where things are kept, and for how long. Pydantic only.

Credentials are never part of it: a run config is stored, shown and sent to clusters. Object storage is found by the usual
AWS_* variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION), PostgreSQL by libpq's (PGPASSWORD
or PGPASSFILE; PGHOST, PGUSER where the URL leaves them out), an MLflow server by MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class StorageConfig(BaseModel):
    """URIs of the stores; what is left empty lies under `root`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str = "runs"
    """Folder or URI under which every run has its own folder. Under a URI, `journal` and `mlflow` are needed."""
    traces: str = ""
    """LanceDB URI; default `<root>/<run>/traces`."""
    served: str = ""
    """LanceDB URI of the answers to people that may be kept; default `<root>/<run>/served`."""
    weights: str = ""
    """Folder or pyarrow filesystem URI; default `<root>/<run>/weights`."""
    journal: str = ""
    """SQLAlchemy URL, e.g. postgresql+psycopg://troupe@host/troupe; default SQLite at `<root>/<run>/journal.db`."""
    mlflow: str = ""
    """MLflow tracking and registry URI; default SQLite at `<root>/mlflow.db`."""
    artifacts: str = ""
    """MLflow artifact root; default `<root>/mlflow-artifacts`."""

    @field_validator("root", "traces", "served", "weights", "journal", "mlflow", "artifacts")
    @classmethod
    def _holds_no_secret(cls, value: str) -> str:
        if "://" in value and urlsplit(value).password:
            shown = value.replace(f":{urlsplit(value).password}@", ":...@")
            raise ValueError(
                f"{shown} holds a password, and a run config is stored and shown: leave it out of the URL and give it "
                "by PGPASSWORD or PGPASSFILE (PostgreSQL), MLFLOW_TRACKING_PASSWORD, AWS_SECRET_ACCESS_KEY"
            )
        return value

    @field_validator("root", "traces", "served", "weights", "artifacts")
    @classmethod
    def _is_a_plain_uri(cls, value: str) -> str:
        if "://" in value and urlsplit(value).query:
            raise ValueError(f"{value} has options after '?': give the endpoint by AWS_ENDPOINT_URL instead")
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


class MaintainConfig(BaseModel):
    """What `troupe maintain` keeps. Episodes and rewards are never removed, only what repeats them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_iterations: int = Field(5, ge=1)
    """The newest finished iterations whose table versions, weights and checkpoints stay as they are."""
    keep_champions: int = Field(3, ge=1)
    """Champions whose weights stay, to roll back to, the present one included; those of every alias stay in any case."""
    leftover_hours: float = Field(24, gt=0)
    """Age from which on what no manifest and no stage names was left by a killed process."""
    readers_s: float = Field(600, ge=0)
    """How long somebody may go on reading what a maintenance replaced: only one that begins later removes it."""
