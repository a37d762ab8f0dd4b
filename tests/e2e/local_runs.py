"""local_runs: `troupe train` of small.yaml as a user starts it, and what its stores say afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.config.run_config import RunConfig, load_config
from pipelines.run.run import Run
from stores.files import is_uri, read_file
from stores.journal.journal import StageRow
from tests.chaos import victims

CONFIG = Path(__file__).parent / "small.yaml"
COMMAND = [str(Path(sys.executable).parent / "troupe"), "train", str(CONFIG)]
DEADLINE_S = 900.0
"""A limit for what hangs: beside other work a run takes three times as long as alone."""


def config_in(root: Path) -> RunConfig:
    return load_config(CONFIG, {"storage.root": str(root)})


def start(
    root: Path | str, log: Path, environment: Mapping[str, str] | None = None, settings: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    changed = [word for setting in (f"storage.root={root}", *settings) for word in ("--set", setting)]
    with log.open("ab") as out:
        return subprocess.Popen(
            [*COMMAND, *changed],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        code = process.wait(timeout=DEADLINE_S)
    finally:
        kill_tree(process.pid)
    assert code == 0, log.read_text()[-6000:]


def kill_tree(pid: int) -> None:
    """kill -9 of a process and everything below it: driver, Ray, replicas, engines, trainers."""
    found = victims.tree(pid)
    victims.kill(found)
    victims.survivors(found[:1], timeout_s=10)


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    """Kills the tree at the moment `ready` is first true; fails if the process ends before."""
    _wait_for(process, ready, log)
    kill_tree(process.pid)
    process.wait(timeout=10)


def kill_one_when(process: subprocess.Popen[bytes], ready: Callable[[], bool], title: str, log: Path) -> None:
    """Kills the processes below `process` with this title at the moment `ready` is first true; fails where there is none."""
    _wait_for(process, ready, log)
    found = victims.find(title, [process.pid])
    assert found, f"no process is titled {title!r}"
    victims.kill(found)


def _wait_for(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)


def rows_of(run: Run) -> dict[str, StageRow]:
    has_begun = is_uri(run.folder) or Path(run.folder).is_dir()
    return {str(row.key): row for row in run.journal.stages(run.run_id)} if has_begun else {}


def is_running(run: Run, iteration: int, stage: str, group: str = "") -> bool:
    row = rows_of(run).get(str(run.key(iteration, stage, group)))
    return row is not None and row.status == "running"


def keys(run: Run, iteration: int) -> list[str]:
    ref = run.iteration(iteration).collected.traces
    return sorted(trace.episode_id for trace in run.traces.read_traces(ref))


def report_of(run: Run) -> dict[str, Any]:
    return json.loads(read_file(f"{run.folder}/report.json") or b"null")


def distance(one: Run, other: Run) -> float:
    """Largest difference between the weights of two runs after the last iteration that both have."""
    from safetensors.numpy import load_file

    iteration = min(one.config.iterations, other.config.iterations)

    def last(run: Run) -> dict[str, Any]:
        return load_file(run.weights.fetch(run.trained(iteration)["team"]) / "model.safetensors")

    mine, theirs = last(one), last(other)
    return max(float(abs(mine[name] - theirs[name]).max()) for name in theirs)


def troupe(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND[0], *arguments, "--root", run.config.storage.root],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
