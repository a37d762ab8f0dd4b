"""held_out: the tasks that a run is measured on -> whether a trace of any origin is of one of them."""

from __future__ import annotations

from collections import defaultdict

from pipelines.run.run import Run
from pipelines.tasks.splits import HELD_OUT, are_one_task
from stores.types import Task, Trace, families


class HeldOut:
    """The tasks that a run is measured on, and how often one was asked for."""

    def __init__(self, run: Run) -> None:
        sections = [section for section in HELD_OUT if getattr(run.config.tasks, section) is not None]
        self._of_prompt: dict[str, list[Task]] = defaultdict(list)
        self._families: set[str] = set()
        for section in sections:
            tasks = run.tasks(section)
            self._families.update(families(tasks).values())
            for task in tasks:
                self._of_prompt[task.prompt].append(task)
        self.num_seen = 0

    def has(self, trace: Trace) -> bool:
        """Whether the trace's task is one of them, or of their families; ids may repeat between runs, so prompt and settings decide."""
        is_variant = not self._families.isdisjoint(families([trace.task]).values())
        is_held_out = is_variant or any(
            are_one_task(trace.task, task) for task in self._of_prompt.get(trace.task.prompt, ())
        )
        self.num_seen += is_held_out
        return is_held_out
