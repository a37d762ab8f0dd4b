"""by_request: what a command asks engines for outside of any iteration: explanations of episodes, a team's answers to a file of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipelines.cluster import connect
from pipelines.config.sections import TaskSourceConfig
from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.played import play_team
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.task_checks import TaskForms
from pipelines.tasks.sources import digest, load_tasks
from serve_apps.authoring.workflow import load_workflow
from stores.types import Purpose

T = TypeVar("T")


def evaluate_team(run: Run, alias: str, tasks_file: Path, *, address: str = "") -> dict[str, Any]:
    """Has a registered team (alias or version number) play a file of tasks; episodes that it played before are used again."""
    forms = TaskForms(load_workflow(run.config.workflow.path, run.config.workflow.settings))
    source = TaskSourceConfig(path=str(tasks_file))
    tasks = load_tasks(source, section="tasks", seed=run.config.seed, check=forms.check)
    version, team = run.load_team(alias)
    occasion = f"evaluate/{digest(tasks)}"
    played = on_engines(
        run,
        lambda: play_team(run, dict(team.models), tasks, iteration=0, purpose=Purpose.AD_HOC, occasion=occasion),
        name="evaluate-team",
        address=address,
    )
    return {
        "team": run.team_name,
        "team_version": version,
        **played.score(run).to_json(),
        "sampling_seconds": played.sampled.sampling_seconds,
        "num_tokens": played.sampled.num_tokens,
    }


def on_engines(run: Run, work: Callable[[], T], *, name: str, address: str, iteration: int = 0, times: int = 1) -> T:
    """Runs `work` while this process alone has the run's engines; it may take `times` as long as an evaluation."""
    connect.connect(address)
    with run.hold_engines():
        watchdog = Watchdog.of_section(run, name, "evaluate", iteration=iteration, times=times, recover=end_collectors)
        return watchdog.watch(work)
