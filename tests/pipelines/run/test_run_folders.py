"""Where a run keeps its journal and MLflow's tables, below a root with any name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from pipelines.run.run import Run
from pipelines.run.stored_runs import journals
from stores.config import StorageConfig

pytestmark = pytest.mark.fast


def run_below(root: Path) -> Run:
    config: Any = SimpleNamespace(run="demo", storage=StorageConfig(root=str(root)))
    return Run(config)


@pytest.mark.parametrize("name", ["q?a", "50%", "q%3Fa", "c#1", "plain"])
def test_a_runs_files_lie_below_its_root(name: str, tmp_path: Path) -> None:
    run = run_below(tmp_path / name)
    run.journal.begin_run("demo", "sha", "{}")
    assert (tmp_path / name / "demo" / "journal.db").is_file()
    assert sa.make_url(run._mlflow[0]).database == str(tmp_path / name / "mlflow.db")
    assert [row.run_id for journal in journals(str(tmp_path / name)) for row in journal.runs()] == ["demo"]
    assert [p.name for p in tmp_path.iterdir()] == [name]
