"""Pages in a real browser through the real `collect`: a tiny model after a warm start plays twenty of them."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.tasks.splits import settings_of
from stores.traces.conventions import is_world_call
from stores.types import Cause, EpisodeStatus, Trace
from tests.e2e.local_runs import COMMAND
from tests.venvs import make_venv
from tests.worlds.miniwob.tasks import PAGES

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.needs_program("chromium"),
    pytest.mark.needs_program("chromedriver"),
]

CONFIG = Path(__file__).parents[2] / "tests" / "worlds" / "miniwob" / "run.yaml"
SETTINGS = {
    "warmstart.num_demonstrations": 120,
    "warmstart.num_epochs": 8,
    "collect.tasks_per_iteration": 4,
    "collect.episodes_per_task": 5,
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """The episodes of a first iteration, after which no process of a browser is left."""
    root = tmp_path_factory.mktemp("browser")
    python = make_venv("miniwob", root)
    settings: dict[str, Any] = {**SETTINGS, "storage.root": str(root), "workflow.settings.python": python}
    changed = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    for command in (["warmstart", str(CONFIG)], ["stage", "collect", "--run", str(CONFIG), "--iteration", "1"]):
        done = subprocess.run(
            [COMMAND[0], *command, *changed],
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, "STARTED_BY": str(root)},
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    _, left = psutil.wait_procs(list(_browsers(str(root))), timeout=15)
    assert left == []
    run = Run(load_config(CONFIG, settings))
    return list(run.traces.read_traces(run.iteration(1).collected.traces))


def _browsers(root: str) -> Iterator[psutil.Process]:
    """Processes of browsers that the commands above have started, whatever their parents are now."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name().startswith("chrom") and process.environ().get("STARTED_BY") == root:
                yield process


def test_twenty_episodes_are_played_and_no_fault_is_the_browsers(collected: list[Trace]) -> None:
    assert len({trace.episode_id for trace in collected}) == 20
    assert Counter(trace.task.source for trace in collected) == dict.fromkeys(PAGES, 5)
    assert {trace.cause for trace in collected} <= {Cause.NONE, Cause.POLICY}
    assert Counter(trace.status for trace in collected)[EpisodeStatus.OK] >= 10


def test_steps_are_events_between_the_turns_of_reader_and_actor(collected: list[Trace]) -> None:
    for trace in collected:
        first, *steps = trace.tool_calls
        assert all(map(is_world_call, trace.tool_calls))
        assert first.request == {"world": 0, "reset": settings_of(trace.task)}
        acted = {turn.turn_index for turn in trace.turns if turn.agent == "actor"}
        assert all(max(step.parents) in acted for step in steps)
