"""task_checks: the tasks of a run -> what `troupe validate` says of them: answers that are missing, fields that nobody reads, worlds that do not begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import load_credit
from pipelines.tasks.splits import SECTIONS
from pipelines.tasks.task_fields import KNOWN_FIELDS, METADATA, unread_fields
from pipelines.tasks.task_files import read_rows
from serve_apps.authoring.workflow import Workflow
from serve_apps.worlds.world import try_environments, try_servers
from stores.types import SOUND, Cause, Task, Trace

MAX_ROWS = 10_000
"""Rows of a file whose fields are looked at."""
MAX_FORMS = 4
"""Tasks that are played, each with metadata of other names."""
PLAY_S = 30.0
"""Seconds that an episode may take beside what a world takes to begin."""


class TaskForms:
    """Checks every task by itself, and keeps the first one of each form: of each set of names in its metadata."""

    def __init__(self, workflow: Workflow) -> None:
        """Args: workflow: it plays the tasks."""
        self._workflow = workflow
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
        self.first.setdefault((frozenset(task.metadata), bool(task.answers)), (at, task))


def unread_notes(config: RunConfig) -> list[str]:
    """Returns a line per task file with fields that no task is made of: how many rows have them, and which are known."""
    sources = [source for section in SECTIONS if (source := getattr(config.tasks, section)) is not None and source.path]
    return [note for path in dict.fromkeys(source.path for source in sources) if (note := _unread_note(Path(path)))]


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


def try_worlds(config: RunConfig, workflow: Workflow, forms: TaskForms) -> list[str]:
    """Plays a task of each form, as `--try` does, and returns a line per environment. Nothing is played where none is declared.

    Raises ValueError where a world does not begin with the settings of a task, or no answer can ever be right.
    """
    if not workflow.environments:
        return []
    try_servers(workflow.environments)
    notes: dict[str, str] = {}
    for at, task in islice(forms.first.values(), MAX_FORMS):
        trace = _played(config, workflow, task)
        _check_begins(trace, at, workflow)
        if trace.status in SOUND:
            _check_judged(config, trace, at)
        else:
            notes[at] = f"{at}: the episode that was tried ended with {trace.status.value}: {trace.error}"
        for name, began_s in _begun(trace, workflow):
            notes.setdefault(name, f"environment {name}: a world of {at} began in {began_s:.1f} s")
    others = {name: environment for name, environment in workflow.environments.items() if name not in notes}
    return [*notes.values(), *try_environments(others)]


def _played(config: RunConfig, workflow: Workflow, task: Task) -> Trace:
    from pipelines.runners.try_episode import play  # needs tokenizers, which a machine that only validates may not have

    longest_s = max(environment.reset_timeout_s for environment in workflow.environments.values())
    limits = config.collect.episode
    limit_s = min(limits.episode_timeout_s, longest_s + PLAY_S)
    return play(config, workflow, task, limits.model_copy(update={"episode_timeout_s": limit_s}))


def _check_begins(trace: Trace, at: str, workflow: Workflow) -> None:
    settings = dict(trace.task.metadata)
    for call in trace.tool_calls:
        if call.tool in workflow.environments and "reset" in call.request and call.error:
            raise ValueError(
                f"{at}: environment {call.tool}: no world begins for task {trace.task.task_id}, whose metadata is {settings}: "
                f"{call.error.strip()}: mend {workflow.environments[call.tool].name}, or the task's `{METADATA}`"
            )
    if trace.cause is Cause.AUTHOR:
        raise ValueError(
            f"{at}: {type(workflow).__name__} cannot play task {trace.task.task_id}, whose metadata is {settings}, whatever a model writes: "
            f"{trace.error}: change the workflow, its demonstrator or the task"
        )


def _check_judged(config: RunConfig, trace: Trace, at: str) -> None:
    """Raises ValueError where the credit rule looks for answers that the task does not have."""
    if trace.task.answers or trace.task.metadata.get("tests"):
        return
    rule = load_credit(config.credit)
    answered = replace(trace, answer="done")
    known = replace(answered, task=replace(trace.task, answers=(answered.answer,)))
    if rule.assign_credit(answered).outcome != rule.assign_credit(known).outcome:
        raise ValueError(
            f"{at}: task {trace.task.task_id} has no answer, and credit rule {config.credit.path!r} compares with it, so that nothing "
            "would ever be right: write its `answer`, or take a rule that reads what the world says, "
            "pipelines.credit.step_rewards:StepRewards for example"
        )


def _begun(trace: Trace, workflow: Workflow) -> Iterator[tuple[str, float]]:
    for call in trace.tool_calls:
        if call.tool in workflow.environments and "reset" in call.request:
            yield call.tool, call.duration_s
