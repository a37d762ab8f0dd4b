"""A real Airflow with two DAG runs at a time over `loop.max_lag: 1`: one is ended by hand, and jobs are killed in three stages.

The result is that of `troupe train`: the same episodes, and the same weights but for what other batches of an engine round.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from tests.chaos import victims
from tests.e2e.airflow_client import LocalAirflow
from tests.e2e.local_runs import CONFIG, distance, finish, is_running, keys, rows_of, start

DAG = "train_team__small"
JOBS = ("troupe iterate", "troupe stage")
ITERATIONS, EPOCHS, MICROBATCH_TOKENS = 3, 12, 256
"""So many epochs of so small microbatches that Airflow's task is there while its stage trains, and Airflow can end it."""
CHANGES = {
    "iterations": ITERATIONS,
    "loop.max_lag": 1,
    "train.num_epochs": EPOCHS,
    "train.microbatch_tokens": MICROBATCH_TOKENS,
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as `troupe train` does it."""
    root = tmp_path_factory.mktemp("twin")
    log = root / "local.log"
    finish(start(root, log, settings=[f"{key}={value}" for key, value in CHANGES.items()]), log)
    return Run(load_config(CONFIG, {"storage.root": str(root), **CHANGES}))


def write_config(folder: Path, *, retries: int) -> Path:
    data = yaml.safe_load(CONFIG.read_text()) | {"iterations": ITERATIONS, "loop": {"max_lag": 1}}
    data["train"] |= {"num_epochs": EPOCHS, "microbatch_tokens": MICROBATCH_TOKENS}
    data |= {"storage": {"root": str(folder / "runs")}, "schedule": {"retries": retries, "retry_delay_s": 2}}
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(data))
    return config


def test_what_one_dag_run_left_is_done_by_the_next_one_and_the_result_is_that_of_the_local_runner(
    twin: Run, tmp_path: Path
) -> None:
    config = write_config(tmp_path, retries=0)
    run = Run(load_config(config))
    with LocalAirflow(tmp_path / "cache", str(config)) as airflow:
        airflow.pause(DAG, is_paused=False)
        airflow.trigger(DAG, "one")
        airflow.wait("the first claim", lambda: begun(airflow, "one"), 600)
        airflow.trigger(DAG, "two")
        airflow.wait("train 1", lambda: is_running(run, 1, "train", "team") and follows(airflow, "one", "train"), 600)
        airflow.ask(f"/dags/{DAG}/dagRuns/one", "PATCH", state="failed")
        airflow.wait("the second DAG run", lambda: airflow.state(DAG, "two") == "success", 600)
        airflow.trigger(DAG, "three")
        airflow.wait("the third DAG run", lambda: airflow.state(DAG, "three") == "success", 300)
        iterations = {name: airflow.xcom(DAG, name, "begin", "iteration") for name in ("one", "two", "three")}
        second_job = airflow.xcom(DAG, "two", "begin", "job")

    assert iterations == {"one": 1, "two": 2, "three": 3}
    rows = rows_of(run)
    stopped, promoted = rows[str(run.key(1, "train", "team"))], rows[str(run.key(1, "promote"))]
    assert (stopped.token, promoted.token) == (2, 1)
    assert second_job in stopped.owner and second_job in promoted.owner, (
        "the second DAG run did what the first one left"
    )
    assert rows[str(run.key(2, "collect"))].started_at < (promoted.ended_at or 0), "it sampled meanwhile"
    assert all(run.journal.ref(run.key(k, "record")) for k in (1, 2, 3))
    assert [run.iteration(k).collected.policy_versions["team"] for k in (1, 2, 3)] == [0, 0, 1]
    assert all(keys(run, k) == keys(twin, k) for k in (1, 2, 3))
    assert distance(run, twin) < 1e-3


def test_jobs_that_are_killed_while_iterations_overlap_change_no_weight(twin: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, retries=6)
    run = Run(load_config(config))
    names = ("one", "two", "three")
    with LocalAirflow(tmp_path / "cache", str(config)) as airflow:
        airflow.pause(DAG, is_paused=False)
        for name in names:
            airflow.trigger(DAG, name)
        for iteration, stage, group in ((1, "train", "team"), (3, "collect", ""), (3, "evaluate", "")):
            airflow.wait(f"{stage} {iteration}", partial(is_running, run, iteration, stage, group), 600)
            jobs = [job for title in JOBS for job in victims.find(title, [airflow.head_pid])]
            assert jobs
            victims.kill(jobs)
        for name in names:
            airflow.wait(f"DAG run {name}", lambda name=name: airflow.state(DAG, name) == "success", 900)
    begun_twice = {key for key, row in rows_of(run).items() if row.token > 1}
    assert begun_twice >= {str(run.key(1, "train", "team")), str(run.key(3, "collect")), str(run.key(3, "evaluate"))}
    assert all(keys(run, k) == keys(twin, k) for k in (1, 2, 3))
    assert distance(run, twin) < 1e-3


def follows(airflow: LocalAirflow, dag_run: str, task: str) -> bool:
    """Whether the task is at work: what is killed before it begins stops no job."""
    return any(t["task_id"] == task and t["state"] in ("running", "deferred") for t in airflow.tasks(DAG, dag_run))


def begun(airflow: LocalAirflow, dag_run: str) -> bool:
    return any(t["task_id"] == "begin" and t["state"] == "success" for t in airflow.tasks(DAG, dag_run))
