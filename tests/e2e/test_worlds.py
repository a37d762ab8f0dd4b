"""A team in worlds through the whole loop, on real engines; the worker of its worlds is killed while it collects."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.types import Cause, EpisodeStatus, Trace
from stores.world_calls import is_world_call
from tests.chaos import victims
from tests.e2e.local_runs import COMMAND, finish, is_running, kill_tree, report_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "infra" / "workflows" / "household.yaml"
SETTINGS = {
    "iterations": 2,
    "tasks.gate.count": 16,
    "tasks.test.count": 16,
    "warmstart.num_demonstrations": 300,
    "warmstart.num_epochs": 1,
    "evaluate.every": 2,
    "collect.num_workers": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, list[int]]]:
    """A finished run, and the process ids of the workers that were killed in its first collect."""
    root = tmp_path_factory.mktemp("household")
    settings: dict[str, Any] = SETTINGS | {"storage.root": str(root)}
    log = root / "log.txt"
    changed = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run = Run(load_config(CONFIG, settings))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [COMMAND[0], "train", str(CONFIG), *changed],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    try:
        killed = _kill_a_worker(process, run, log)
        finish(process, log)
    finally:
        kill_tree(process.pid)
    yield run, killed


def _kill_a_worker(process: subprocess.Popen[bytes], run: Run, log: Path) -> list[int]:
    """Kills the worker that holds the worlds of the collector, once some episodes are under way; when it is back nothing more."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if is_running(run, 1, "collect"):
            collectors = [p.pid for p in victims.find("ray::Collector", [process.pid])]
            if found := victims.find("world_worker.py", collectors):
                time.sleep(1.0)
                victims.kill(found)
                return [worker.pid for worker in found]
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-6000:])


def episodes(run: Run, iteration: int) -> list[Trace]:
    return list(run.traces.read_traces(run.iteration(iteration).collected.traces))


def test_no_episode_is_lost_or_doubled_and_those_of_the_killed_worker_are_played_again(
    trained: tuple[Run, list[int]],
) -> None:
    run, killed = trained
    assert killed
    for iteration in (1, 2):
        played = episodes(run, iteration)
        assert len(played) == len({trace.episode_id for trace in played}) == 96
        assert {trace.cause for trace in played} <= {Cause.NONE, Cause.POLICY}
    again = Counter(trace.attempt for trace in episodes(run, 1))
    assert again[2] > 0, "the episodes whose worlds were lost"
    assert set(Counter(trace.attempt for trace in episodes(run, 2))) == {1}


def test_steps_are_events_between_the_turns_and_every_room_is_the_tasks(trained: tuple[Run, list[int]]) -> None:
    for trace in episodes(trained[0], 2):
        assert trace.status is EpisodeStatus.OK, trace.error
        first, *steps = trace.tool_calls
        assert all(map(is_world_call, trace.tool_calls))
        assert first.request == {"world": 0, "reset": dict(trace.task.metadata)}
        acted = {turn.turn_index for turn in trace.turns if turn.agent == "actor"}
        assert all(max(step.parents) in acted for step in steps)
        assert len(steps) == len(acted) <= 14


def test_both_agents_train_and_trainer_and_engine_agree(trained: tuple[Run, list[int]]) -> None:
    report = report_of(trained[0])
    assert report["funnel"].keys() == {"planner", "actor"}
    assert all(of["trained"] > 0 for of in report["funnel"].values())
    assert 0 < report["logprob_gap"]["mean"] < 1e-3
