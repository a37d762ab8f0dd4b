"""repository_rows: a row in the form of SWE-bench, with the folder of its snapshot -> a task to repair that repository.

    {"instance_id": "me__calc-1", "repo": "me/calc", "problem_statement": "...", "snapshot": "snapshots/me__calc-1",
     "test_patch": "diff --git ...", "FAIL_TO_PASS": ["tests/test_add.py::test_add"], "PASS_TO_PASS": "[...]", "patch": "diff --git ..."}

The solution (`patch`) does not come into the task. `serve_apps.extensions.repository.repository:Repository` takes the rest as its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stores.types import Task

REPAIRED = "repaired"
"""The answer of an episode after which all tests that should pass do."""
ISSUE, FAILING = "problem_statement", "FAIL_TO_PASS"
SETTINGS = ("snapshot", "test_patch", FAILING, "PASS_TO_PASS", "site", "time_s", "memory_mib")
"""Fields that the world takes."""
REPOSITORY_FIELDS = (ISSUE, *SETTINGS, "instance_id", "repo", "base_commit", "patch")
"""Fields that are read, and the solution."""


def is_repository(row: Mapping[str, Any]) -> bool:
    """Whether a row describes a repository to repair."""
    return ISSUE in row and FAILING in row


def repository_task(row: Mapping[str, Any], at: str) -> Task:
    """Returns the task of a row. Raises ValueError for a row without an issue, or whose snapshot is no folder."""
    issue, snapshot = str(row[ISSUE] or "").strip(), row.get("snapshot")
    if not issue:
        raise ValueError(f"{at}: {ISSUE} is empty")
    if not snapshot or not Path(snapshot).is_dir():
        raise ValueError(
            f"{at}: snapshot = {snapshot!r} is no folder: check the repository out at its base_commit ({row.get('base_commit')}) and name "
            "that folder, seen from where Troupe runs"
        )
    settings = {name: row[name] for name in SETTINGS if row.get(name) is not None}
    return Task(
        task_id=str(row.get("instance_id") or snapshot),
        prompt=issue,
        answers=(REPAIRED,),
        source=str(row.get("repo") or ""),
        metadata=settings,
    )
