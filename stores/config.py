"""Where things are kept. Pydantic only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StorageConfig(BaseModel):
    """URIs of the stores; what is left empty lies under `root`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str = "runs"
    """Folder or URI under which every run has its own folder."""
    traces: str = ""
    """LanceDB URI; default `<root>/<run>/traces`."""
    weights: str = ""
    """Folder or pyarrow filesystem URI; default `<root>/<run>/weights`."""
    journal: str = ""
    """SQLAlchemy URL; default SQLite at `<root>/<run>/journal.db`."""
    mlflow: str = ""
    """MLflow tracking and registry URI; default SQLite at `<root>/mlflow.db`."""
    artifacts: str = ""
    """MLflow artifact root; default `<root>/mlflow-artifacts`."""
