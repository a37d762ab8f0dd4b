"""task_checks: the tasks of a run -> what `troupe validate` says of them: answers that are missing, fields that nobody reads."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from pipelines.config.run_config import RunConfig
from pipelines.tasks.splits import SECTIONS
from pipelines.tasks.task_fields import KNOWN_FIELDS, METADATA, unread_fields
from pipelines.tasks.task_files import read_rows
from serve_apps.authoring.workflow import Workflow
from stores.types import Task

MAX_ROWS = 10_000
"""Rows of a file whose fields are looked at."""


class TaskForms:
    """Checks every task by itself, and keeps the first one of each form: of each set of names in its metadata."""

    def __init__(self, workflow: Workflow, credit: object = None) -> None:
        """Args: workflow: it plays the tasks; credit: the rule that compares their answers."""
        self._workflow, self._reads = workflow, getattr(credit, "reads", None)
        self._unread: list[str] = []
        self.first: dict[tuple[frozenset[str], bool], tuple[str, Task]] = {}
        """Place and task."""

    def check(self, task: Task, at: str) -> None:
        """Raises ValueError, naming the place, for a task that cannot be played, or whose answer nobody can judge."""
        if not (task.answers or task.metadata.get("tests") or self._workflow.environments):
            raise ValueError(
                f"{at}: task {task.task_id} has neither answer nor tests, and {type(self._workflow).__name__} declares no Environment "
                "that could say whether it is done: write its `answer`"
            )
        self._workflow.check_task(task, at)
        if self._reads and task.answers and not any(map(self._reads, task.answers)):
            self._unread.append(f"{task.answers[0]!r:.80} at {at}")
        self.first.setdefault((frozenset(task.metadata), bool(task.answers)), (at, task))

    def notes(self) -> list[str]:
        """Returns a line on references that the credit rule cannot read, with examples; none where there are no such."""
        if not self._unread:
            return []
        shown = ", ".join(self._unread[:3])
        return [
            f"{len(self._unread)} tasks have a sentence for an answer, which only the same sentence matches, for example {shown}: "
            "write the bare answer, 14 for 'The result is 14.'"
        ]


def unread_notes(config: RunConfig) -> list[str]:
    """Returns a line per task file with fields that no task is made of: how many rows have them, and which are known."""
    sources = [source for section in SECTIONS if (source := getattr(config.tasks, section)) is not None]
    files = dict.fromkeys(file for source in sources for file in source.files)
    return [note for file in files if (note := _unread_note(file))]


def _unread_note(path: Path) -> str:
    num_rows: Counter[str] = Counter()
    for _, row in islice(read_rows(path, "tasks"), MAX_ROWS):
        num_rows.update(unread_fields(row))
    if not num_rows:
        return ""
    fields = ", ".join(f"{name!r} ({number} rows{_meant(name)})" for name, number in num_rows.most_common())
    return f"{path}: nobody reads {fields}: what a workflow or a world needs goes into `{METADATA}`; known are {', '.join(KNOWN_FIELDS)}"


def _meant(name: str) -> str:
    nearest = get_close_matches(name, KNOWN_FIELDS, n=1, cutoff=0.8)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
