"""Dynamic sampling over a real store and the run's own credit rule; only the engines are left out.

With engines it is played by `make algorithms` (row dapo).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.config.run_config import load_config
from pipelines.episodes import dynamic_sampling
from pipelines.episodes.dynamic_sampling import refill
from pipelines.episodes.sampling import Pass, Sampled
from pipelines.run.run import Run
from pipelines.stages.collect import iteration_tasks
from serve_apps.episode_spec import EpisodeSpec
from stores.types import Purpose, Task

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
KEY: dict[str, Any] = {"iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
TEAM_SPEC: Any = SimpleNamespace(team_key="team")
SECONDS = 1.5
"""Of each episode, all at once: what `make_trace` says."""

Start = Callable[..., tuple[Run, list[str]]]


class Killed(Exception):
    """The stage's process is gone."""


def teaches(task: Task) -> bool:
    """Every third task's episodes differ; the others are never solved."""
    return sum(map(ord, task.prompt)) % 3 == 0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trace: MakeTrace) -> Start:
    """`start(folder, settings, killed_after=n)`: a run, and the tasks whose episodes were really played, in order.

    With `killed_after` the process ends in the n-th episode.
    """

    def begin(folder: str, *, killed_after: int | None = None, **settings: Any) -> tuple[Run, list[str]]:
        changes = {"tasks_per_iteration": 6, "episodes_per_task": 2, "dynamic_sampling": {"max_refills": 9}} | settings
        given = {f"collect.{name}": value for name, value in changes.items()}
        run = Run(load_config(SMALL, {"storage.root": str(tmp_path / folder), **given}))
        run.open()
        played: list[str] = []

        def sample(tasks: Sequence[Task], of: Pass, **more: Any) -> Sampled:
            where = {"run_id": run.run_id, **KEY}
            stored = set(run.traces.stored_episodes(**where)["episode_id"].to_pylist())
            groups, num_new = [], 0
            for task in tasks:
                for index in range(more["episodes_per_task"]):
                    spec = EpisodeSpec(**where, task=task, episode_index=index, run_seed=of.seed)
                    groups.append(spec.group_id)
                    if spec.episode_id in stored:
                        continue
                    if len(played) == killed_after:
                        raise Killed
                    is_solved = teaches(task) and index == 0
                    trace = make_trace(**where, task=task, episode_id=spec.episode_id, episode_index=index)
                    answer = task.answers[0] if is_solved else "nothing"
                    run.traces.write_episodes([replace(trace, group_id=spec.group_id, answer=answer)])
                    played.append(task.task_id)
                    num_new += 1
            excluded = set(run.traces.stored_episodes(**where)["group_id"].to_pylist()) - set(groups)
            return Sampled(
                traces=run.traces.pin_episodes(**where, excluded_groups=sorted(excluded)),
                groups=sorted(set(groups)),
                num_new=num_new,
                num_kept=0,
                statuses={},
                num_tokens=0,
                sampling_seconds=0.0,
                seconds=0.0,
                stopped_by=None,
                tasks_left=(),
            )

        monkeypatch.setattr(dynamic_sampling, "sample_episodes", sample)
        run.__dict__["sample"] = sample
        return run, played

    return begin


def collected(run: Run) -> tuple[list[Sampled], dict[str, int]]:
    """What `collect` does with it."""
    tasks, settings = iteration_tasks(run, run.iteration(1)), run.config.collect
    by = Pass.of(run, TEAM_SPEC, iteration=1)
    first = run.__dict__["sample"](tasks, by, episodes_per_task=settings.episodes_per_task)
    return refill(run, tasks, first, by)


def pinned_tasks(run: Run, passes: list[Sampled]) -> dict[str, int]:
    found: dict[str, int] = {}
    for trace in run.traces.read_traces(passes[-1].traces):
        assert teaches(trace.task)
        found[trace.task.task_id] = found.get(trace.task.task_id, 0) + 1
    return found


def test_groups_without_signal_make_room_for_others_until_there_are_as_many_as_were_wanted(start: Start) -> None:
    run, played = start("run")
    passes, counts = collected(run)
    found = pinned_tasks(run, passes)
    assert len(found) == 6 and set(found.values()) == {2}, "whole groups, all with signal"
    assert counts["done"] == 6 and counts["refilled"] == len(set(played)) - 6
    assert counts["without_signal"] == len(set(played)) - 6
    assert len(played) == 2 * len(set(played)), "no task twice"


@pytest.mark.nightly
def test_a_killed_collect_comes_to_the_end_of_one_that_was_not(start: Start) -> None:
    whole, played = start("whole")
    expected = pinned_tasks(whole, collected(whole)[0])
    for killed_after in (3, 12, 15, len(played) - 1):
        with pytest.raises(Killed):
            collected(start(f"killed{killed_after}", killed_after=killed_after)[0])
        again, rest = start(f"killed{killed_after}")
        assert pinned_tasks(again, collected(again)[0]) == expected
        assert len(rest) == len(played) - killed_after, "what was stored is not played again"


def test_refills_are_bounded(start: Start) -> None:
    run, played = start("run", dynamic_sampling={"max_refills": 1})
    _, counts = collected(run)
    first = sum(teaches(task) for task in iteration_tasks(run, run.iteration(1)))
    assert len(set(played)) == 6 + (6 - first) and counts["refills"] == 1
    assert first <= counts["done"] < 6


@pytest.mark.parametrize(("budget", "refills"), [({"seconds": SECONDS}, 0), ({"tokens": 1}, 0), ({"tokens": 10**9}, 4)])
def test_no_pass_begins_once_the_budget_is_spent(start: Start, budget: dict[str, float], refills: int) -> None:
    run, _ = start("run", budget=budget, dynamic_sampling={"max_refills": 4})
    assert collected(run)[1]["refills"] == refills
