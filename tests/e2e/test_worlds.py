"""A team in worlds through the whole loop, on real engines, while a worker of its worlds dies or hangs, or their server is restarted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.tasks.splits import settings_of
from stores.traces.conventions import is_world_call
from stores.types import Cause, EpisodeStatus, Trace
from tests.chaos import victims
from tests.e2e.local_runs import COMMAND, finish, is_running, kill_tree, report_of
from tests.servers import free_port
from tests.waits import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "infra" / "workflows" / "household.yaml"
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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A finished run; in its first collect the worker of the worlds was killed, in the second it hung."""
    with training(tmp_path_factory.mktemp("household"), {}) as (process, run, log):
        victims.kill(_world_workers(process, run, log, iteration=1))
        for worker in _world_workers(process, run, log, iteration=2):
            worker.suspend()
        finish(process, log)
        yield run


@pytest.fixture(scope="module")
def served_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A finished run whose worlds live on an OpenEnv server, which was killed in the first collect and came back after 5 s."""
    port = free_port()
    remote = {
        "iterations": 1,
        "workflow": {
            "path": "tests.e2e.house_server:RemoteHousehold",
            "settings": {"url": f"http://127.0.0.1:{port}"},
        },
    }
    with ExitStack() as stack:
        server = stack.enter_context(house_server(port))
        process, run, log = stack.enter_context(training(tmp_path_factory.mktemp("remote"), remote))
        _wait_for_collect(process, run, log, iteration=1)
        wait_until(lambda: _has_callers(server), timeout_s=300)
        time.sleep(1.0)
        server.kill()
        time.sleep(5.0)
        stack.enter_context(house_server(port))
        finish(process, log)
        yield run


@contextmanager
def training(root: Path, settings: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], Run, Path]]:
    """`troupe train` with its run and its log; nothing of it is left after the block."""
    settings = {**SETTINGS, **settings, "storage.root": str(root)}
    log = root / "log.txt"
    changed = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [COMMAND[0], "train", str(CONFIG), *changed],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, Run(load_config(CONFIG, settings)), log
    finally:
        kill_tree(process.pid)


@contextmanager
def house_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "tests.e2e.house_server", str(port)], cwd=ROOT)
    try:
        wait_until(lambda: _accepts(port), timeout_s=60)
        yield process
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _has_callers(server: subprocess.Popen[bytes]) -> bool:
    """Whether an episode is under way in its worlds."""
    return any(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(server.pid).net_connections("tcp"))


def _wait_for_collect(process: subprocess.Popen[bytes], run: Run, log: Path, *, iteration: int) -> None:
    deadline = time.monotonic() + 600
    while not is_running(run, iteration, "collect"):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.05)


def _world_workers(process: subprocess.Popen[bytes], run: Run, log: Path, *, iteration: int) -> list[psutil.Process]:
    """Returns the worker that holds the worlds of the collector, once some episodes of the iteration are under way."""
    _wait_for_collect(process, run, log, iteration=iteration)
    while is_running(run, iteration, "collect"):
        collectors = [p.pid for p in victims.find("ray::Collector", [process.pid])]
        if found := victims.find("world_worker.py", collectors):
            time.sleep(1.0)
            return found
        time.sleep(0.05)
    raise AssertionError("no worker of worlds was seen in collect\n" + log.read_text()[-6000:])


def episodes(run: Run, iteration: int) -> list[Trace]:
    return list(run.traces.read_traces(run.iteration(iteration).collected.traces))


@pytest.mark.parametrize("iteration", [1, 2])
def test_no_episode_is_lost_or_doubled_and_those_of_the_lost_worker_are_played_again(
    trained: Run, iteration: int
) -> None:
    played = episodes(trained, iteration)
    assert len(played) == len({trace.episode_id for trace in played}) == 96
    assert {trace.cause for trace in played} <= {Cause.NONE, Cause.POLICY}
    assert Counter(trace.attempt for trace in played)[2] > 0, "the episodes whose worlds were lost"


def test_a_server_of_worlds_that_is_stopped_and_started_again_costs_no_episode(served_elsewhere: Run) -> None:
    played = episodes(served_elsewhere, 1)
    assert len(played) == len({trace.episode_id for trace in played}) == 96
    assert {trace.cause for trace in played} <= {Cause.NONE, Cause.POLICY}
    assert Counter(trace.attempt for trace in played)[2] > 0, "the episodes whose worlds were lost"


def test_steps_are_events_between_the_turns_and_every_room_is_the_tasks(trained: Run) -> None:
    for trace in episodes(trained, 2):
        assert trace.status is EpisodeStatus.OK, trace.error
        first, *steps = trace.tool_calls
        assert all(map(is_world_call, trace.tool_calls))
        assert first.request == {"world": 0, "reset": settings_of(trace.task)}
        acted = {turn.turn_index for turn in trace.turns if turn.agent == "actor"}
        assert all(max(step.parents) in acted for step in steps)
        assert len(steps) == len(acted) <= 14


def test_both_agents_train_and_trainer_and_engine_agree(trained: Run) -> None:
    report = report_of(trained)
    assert report["funnel"].keys() == {"planner", "actor"}
    assert all(of["trained"] > 0 for of in report["funnel"].values())
    assert 0 < report["logprob_gap"]["mean"] < 1e-3
