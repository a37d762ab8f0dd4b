"""by_request: what a command asks engines for outside of any iteration: explanations of episodes, a team's answers to files of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipelines.cluster import connect
from pipelines.config.sections import EvaluateConfig, TaskSourceConfig
from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.played import play_team
from pipelines.evaluation.statistics import pass_curve
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.task_checks import TaskForms
from pipelines.tasks.sources import digest, load_tasks
from serve_apps.authoring.workflow import load_workflow
from stores.types import Purpose, Task

T = TypeVar("T")


def evaluate_team(
    run: Run,
    alias: str,
    files: Sequence[Path],
    *,
    k: int | None = None,
    temperature: float | None = None,
    address: str = "",
) -> dict[str, Any]:
    """Has a registered team (alias or version number) play files of tasks; episodes that it played before are used again.

    Args: k, temperature: in place of `evaluate.episodes_per_task` and `evaluate.temperature`. Returns accuracy (avg@k) with its interval
    and pass@k for each k, of all tasks and by data set, and figures per agent. Raises ValueError for files that share a data set.
    """
    settings = _settings(run.config.evaluate, k=k, temperature=temperature)
    tasks = _load(run, files)
    version, team = run.load_team(alias)
    at = "" if temperature is None else f"/{temperature:g}"
    played = on_engines(
        run,
        lambda: play_team(
            run,
            dict(team.models),
            tasks,
            iteration=0,
            purpose=Purpose.AD_HOC,
            occasion=f"evaluate/{digest(tasks)}{at}",
            settings=settings,
        ),
        name="evaluate-team",
        address=address,
    )
    return {
        "team": run.team_name,
        "team_version": version,
        **played.score(run).to_json(),
        "pass_at_k": pass_curve(played.outcomes),
        "sources": {
            source: {
                "accuracy": (accuracy := played.interval(run, outcomes)).mean,
                "ci95": accuracy.ci95,
                "num_tasks": accuracy.num_tasks,
                "pass_at_k": pass_curve(outcomes),
            }
            for source, outcomes in played.by_source().items()
        },
        "temperature": settings.temperature,
        "sampling_seconds": played.sampled.sampling_seconds,
        "num_tokens": played.sampled.num_tokens,
    }


def _settings(config: EvaluateConfig, *, k: int | None, temperature: float | None) -> EvaluateConfig:
    changes = {"episodes_per_task": k, "temperature": temperature}
    settings = config.model_copy(update={key: value for key, value in changes.items() if value is not None})
    if k is not None and k > 1 and settings.temperature == 0:
        raise ValueError(
            f"--k {k}: at temperature 0 all {k} episodes of a task are alike: give --temperature, e.g. --temperature 0.6"
        )
    return settings


def _load(run: Run, files: Sequence[Path]) -> list[Task]:
    """The tasks of all files, of several with their data set in their ids. Each file has data sets of its own, by which figures are told."""
    forms = TaskForms(load_workflow(run.config.workflow.path, run.config.workflow.settings))
    tasks: list[Task] = []
    file_of: dict[str, Path] = {}
    for file in files:
        own = load_tasks(TaskSourceConfig(path=str(file)), section="tasks", seed=run.config.seed, check=forms.check)
        for source in sorted({task.source for task in own}):
            if (other := file_of.setdefault(source, file)) is not file:
                raise ValueError(
                    f"--tasks {other} and --tasks {file} both hold tasks of the data set {source!r}, which is the file's name where a row "
                    "has no `data_source`: give the rows one, rename a file, or name each file once"
                )
        tasks += own if len(files) == 1 else [_within_source(task) for task in own]
    return tasks


def _within_source(task: Task) -> Task:
    if task.task_id.startswith(f"{task.source}/"):
        return task
    return replace(task, task_id=f"{task.source}/{task.task_id}")


def on_engines(run: Run, work: Callable[[], T], *, name: str, address: str, iteration: int = 0, times: int = 1) -> T:
    """Runs `work` while this process alone has the run's engines; it may take `times` as long as an evaluation."""
    connect.connect(address)
    with run.hold_engines():
        watchdog = Watchdog.of_section(run, name, "evaluate", iteration=iteration, times=times, recover=end_collectors)
        return watchdog.watch(work)
