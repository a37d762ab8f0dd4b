"""How many threads an engine or a training worker gets where the settings leave it to the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run import cpu_threads
from pipelines.run.cpu_threads import engine_threads, threads_of, trainer_threads, usable_cores
from pipelines.run.run import Run

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
LARGE, TINY = 135_000_000, 800_000


@pytest.mark.parametrize(
    ("num_parameters", "num_at_once", "num_cores", "threads"),
    [(LARGE, 1, 2, 2), (LARGE, 2, 2, 1), (LARGE, 3, 2, 1), (LARGE, 2, 8, 4), (LARGE, 1, 64, 7), (TINY, 1, 8, 1)],
)
def test_processes_that_compute_at_once_share_the_cores(
    num_parameters: int, num_at_once: int, num_cores: int, threads: int
) -> None:
    assert threads_of(num_parameters, num_at_once=num_at_once, num_cores=num_cores) == threads


@pytest.mark.parametrize(
    ("quota", "environment", "cores"), [(None, "", 8), (3.5, "", 3), (3.5, "1", 1), (12.0, "", 8), (0.5, "", 1)]
)
def test_cores_are_those_of_affinity_quota_and_environment(
    quota: float | None, environment: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert usable_cores() == cores


def test_engines_share_with_engines_and_trainers_with_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_threads, "num_parameters", lambda run, group: LARGE)
    changes = {
        "model_groups": {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier"]}},
        "serve.num_replicas": 2,
    }
    run = Run(load_config(SMALL, changes))
    assert engine_threads(run, "a") == 2 and trainer_threads(run, "b") == 4
    own = Run(load_config(SMALL, {**changes, "serve.threads": 5, "train.threads": 6}))
    assert engine_threads(own, "a") == 5 and trainer_threads(own, "b") == 6
    assert own.config.sha256 == run.config.sha256, "another machine goes on with the same run"


def test_where_iterations_overlap_engines_and_trainers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_threads, "num_parameters", lambda run, group: LARGE)
    run = Run(load_config(SMALL, {"loop.max_lag": 1, "serve.num_replicas": 3}))
    assert engine_threads(run, "team") == trainer_threads(run, "team") == 2
