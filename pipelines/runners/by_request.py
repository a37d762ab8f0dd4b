"""by_request: what a command asks engines for outside of any iteration: explanations of episodes, a team's answers to a file of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipelines.cluster import connect
from pipelines.config.sections import TaskSourceConfig
from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.lost_tasks import LostTasks, lost_episodes
from pipelines.evaluation.played import play_team
from pipelines.evaluation.why import explain
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.task_checks import TaskForms
from pipelines.tasks.sources import digest, load_tasks
from serve_apps.authoring.workflow import load_workflow
from stores.traces.explanations import Explanation
from stores.types import Purpose

T = TypeVar("T")


def explain_episode(run: Run, episode_id: str, *, budget: int, address: str = "") -> Explanation:
    """Finds the turn that decided an episode by playing it again at most `budget` times."""
    return _on_engines(run, lambda: explain(run, episode_id, budget=budget), name="why", address=address)


def explain_lost_tasks(run: Run, iteration: int, *, tasks: int, budget: int, address: str = "") -> LostTasks:
    """Explains the candidate's episodes of the `tasks` that it lost most at the gate, with `budget` replays each."""
    lost = lost_episodes(run, iteration)
    found = LostTasks(iteration=iteration, num_lost=len(lost), explanations=[], faults=[])

    def explain_each() -> None:
        for episode in lost[:tasks]:
            try:
                found.explanations.append(explain(run, episode, budget=budget))
            except ValueError as fault:  # one that cannot be replayed leaves the others alone
                found.faults.append(str(fault))

    if lost:
        _on_engines(run, explain_each, name="why", address=address, iteration=iteration, times=len(lost[:tasks]))
    return found


def evaluate_team(run: Run, alias: str, tasks_file: Path, *, address: str = "") -> dict[str, Any]:
    """Has a registered team (alias or version number) play a file of tasks; episodes that it played before are used again."""
    forms = TaskForms(load_workflow(run.config.workflow.path, run.config.workflow.settings))
    source = TaskSourceConfig(path=str(tasks_file))
    tasks = load_tasks(source, section="tasks", seed=run.config.seed, check=forms.check)
    version, team = run.load_team(alias)
    occasion = f"evaluate/{digest(tasks)}"
    played = _on_engines(
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


def _on_engines(run: Run, work: Callable[[], T], *, name: str, address: str, iteration: int = 0, times: int = 1) -> T:
    """Runs `work` while this process alone has the run's engines; it may take `times` as long as an evaluation."""
    connect.connect(address)
    with run.hold_engines():
        timeout_s = times * run.config.evaluate.stage_timeout_s
        watchdog = Watchdog(
            run,
            run.key(iteration, name),
            timeout_s=timeout_s,
            timeout_key="evaluate.stage_timeout_s",
            recover=end_collectors,
        )
        return watchdog.watch(work)
