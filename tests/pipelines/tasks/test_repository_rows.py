"""Rows in the form of SWE-bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.tasks.task_fields import read_task

pytestmark = pytest.mark.fast
ROW: dict[str, Any] = {
    "repo": "me/calc", "instance_id": "me__calc-1", "base_commit": "f" * 40, "patch": "the solution", "test_patch": "",
    "problem_statement": "add is wrong", "hints_text": "look at line 2", "created_at": "2026-01-01", "version": "1",
    "FAIL_TO_PASS": '["test_calc.py::test_add"]', "PASS_TO_PASS": "[]", "environment_setup_commit": None,
}  # fmt: skip


def test_a_row_becomes_a_task_without_its_solution(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("x = 1\n")
    task = read_task({**ROW, "snapshot": str(tmp_path)}, "row 1", "rows")
    assert (task.task_id, task.prompt, task.answers, task.source) == (
        "me__calc-1",
        "add is wrong",
        ("repaired",),
        "me/calc",
    )
    assert "solution" not in json.dumps(task.metadata) and "line 2" not in json.dumps(task.metadata)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"snapshot": None}, "row 1: snapshot = None is no folder: check the repository out at its base_commit"),
        ({"snapshot": "nowhere"}, "row 1: snapshot = 'nowhere' is no folder"),
        ({"problem_statement": " "}, "row 1: problem_statement is empty"),
    ],
)
def test_a_row_that_cannot_be_played_says_why(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_task({**ROW, **change}, "row 1", "rows")
