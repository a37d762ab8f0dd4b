"""try_worlds: the tasks of a workflow that acts in worlds -> lines on how they begin, or what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import credit_of, load_credit
from pipelines.runners.task_checks import TaskForms
from pipelines.runners.validate import check_tasks
from pipelines.tasks.task_fields import METADATA
from serve_apps.authoring.workflow import Workflow, load_workflow
from serve_apps.worlds.world import try_environments, try_servers
from stores.types import SOUND, Cause, Task, Trace

MAX_FORMS = 4
"""Tasks that are played, each with metadata of other names."""
PLAY_S = 30.0
"""Seconds that an episode may take beside what a world takes to begin."""


def notes(config: RunConfig) -> list[str]:
    """Plays a task of each form, as `--try` does, and returns a line per environment. Nothing is played where none is declared.

    Raises ValueError where a world does not begin with the settings of a task, or no answer can ever be right.
    """
    workflow = load_workflow(config.workflow.path, config.workflow.settings)
    if not workflow.environments:
        return []
    forms = TaskForms(workflow)
    check_tasks(config, check=forms.check)
    try_servers(workflow.environments)
    lines: dict[str, str] = {}
    for at, task in islice(forms.first.values(), MAX_FORMS):
        trace = _played(config, workflow, task)
        _check_begins(trace, at, workflow)
        if trace.status in SOUND:
            _check_judged(config, trace, at)
        else:
            lines[at] = f"{at}: the episode that was tried ended with {trace.status.value}: {trace.error}"
        for name, began_s in _begun(trace, workflow):
            lines.setdefault(name, f"environment {name}: a world of {at} began in {began_s:.1f} s")
    others = {name: environment for name, environment in workflow.environments.items() if name not in lines}
    return [*lines.values(), *try_environments(others)]


def _played(config: RunConfig, workflow: Workflow, task: Task) -> Trace:
    # It needs tokenizers, which a machine that only validates may not have.
    from pipelines.extensions.preflight.try_episode import play

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
    if credit_of(rule, answered).outcome != credit_of(rule, known).outcome:
        raise ValueError(
            f"{at}: task {trace.task.task_id} has no answer, and credit rule {config.credit.path!r} compares with it, so that nothing "
            "would ever be right: write its `answer`, or take a rule that reads what the world says, "
            "pipelines.credit.step_rewards:StepRewards for example"
        )


def _begun(trace: Trace, workflow: Workflow) -> Iterator[tuple[str, float]]:
    for call in trace.tool_calls:
        if call.tool in workflow.environments and "reset" in call.request:
            yield call.tool, call.duration_s
