"""A row of SWE-bench is what the world takes as its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.tasks.task_fields import read_task
from serve_apps.extensions.repository.repository import Repository
from tests.pipelines.tasks.test_repository_rows import ROW

pytestmark = pytest.mark.fast


def test_a_row_becomes_settings_of_the_world(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("x = 1\n")
    Repository(**read_task({**ROW, "snapshot": str(tmp_path)}, "row 1", "rows").metadata)
