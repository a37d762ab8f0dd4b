"""The README's own workflow and run config, trained for an iteration exactly as it stands there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.types import TracesRef
from tests.docs.readme_example import write_example
from tests.e2e.local_runs import COMMAND

pytestmark = pytest.mark.nightly

SMALL = (
    "iterations=1",
    "serve.max_model_len=256",
    "serve.kv_cache_gib=0.25",
    "tasks.gate.count=12",
    "tasks.test.count=12",
    "collect.tasks_per_iteration=4",
    "collect.episodes_per_task=4",
    "agents.solver.max_tokens=24",
    "agents.verifier.max_tokens=24",
)


def test_the_readme_example_runs_as_it_stands_there(tmp_path: Path, tiny_model: Path) -> None:
    write_example(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "models" / "base")
    changes = [part for change in SMALL for part in ("--set", change)]
    done = subprocess.run(
        [COMMAND[0], "train", "my_team.yaml", *changes], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    storage = {"storage.root": str(tmp_path / "runs"), "model_groups.team.model": str(tmp_path / "models" / "base")}
    run = Run(load_config(tmp_path / "my_team.yaml", storage))
    collected = run.journal.ref(run.key(1, "collect"))
    assert collected is not None
    traces = list(run.traces.read_traces(TracesRef(**collected["traces"])))
    assert len(traces) == 16
    assert {turn.agent for trace in traces for turn in trace.turns} == {"solver", "verifier"}
    assert (tmp_path / "runs" / "my-team" / "report.html").is_file()
