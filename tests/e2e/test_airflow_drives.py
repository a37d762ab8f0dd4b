"""A real Airflow drives: what it pauses, holds back in a pool, clears or marks failed is what the warm job of an iteration does not do.

One run, four DAG runs by hand; the pool of `train` has no slot until a test gives it one, so that a DAG run stands between two stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipelines.cluster.job_api import Job, JobApi
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from tests.e2e.airflow_client import LocalAirflow
from tests.e2e.local_runs import CONFIG, is_running, rows_of

DAG, POOL = "train_team__small", "trainers"
STILL_S = 15.0
"""So long nothing may begin; a stage that is asked for begins within seconds."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    folder = tmp_path_factory.mktemp("airflow")
    schedule = {"retries": 1, "retry_delay_s": 1, "trainer_pool": POOL, "max_rejections": 9}
    data = yaml.safe_load(CONFIG.read_text()) | {"iterations": 4, "storage": {"root": str(folder / "runs")}}
    (folder / "small.yaml").write_text(yaml.safe_dump(data | {"schedule": schedule}))
    with LocalAirflow(folder / "cache", str(folder / "small.yaml")) as airflow:
        airflow.ask("/pools", "POST", name=POOL, slots=0, include_deferred=True)
        airflow.wait("the DAG", lambda: DAG in {dag["dag_id"] for dag in airflow.ask("/dags")["dags"]}, 180)
        airflow.pause(DAG, is_paused=False)
        yield airflow


@pytest.fixture
def run(airflow: LocalAirflow) -> Run:
    return Run(load_config(Path(airflow.run_configs)))


def set_slots(airflow: LocalAirflow, count: int) -> None:
    airflow.ask(f"/pools/{POOL}?update_mask=slots", "PATCH", pool=POOL, slots=count, include_deferred=True)


def states(airflow: LocalAirflow, dag_run: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.tasks(DAG, dag_run)}


def warm_jobs(airflow: LocalAirflow) -> list[Job]:
    """Jobs of whole iterations that have not ended."""
    return [job for job in JobApi(airflow.jobs_url).jobs() if "iterate" in job.submission_id and not job.has_ended]


def stand_before_train(airflow: LocalAirflow, run: Run, dag_run: str, iteration: int) -> None:
    """Begins a DAG run, and returns when its train task waits for a slot."""
    airflow.trigger(DAG, dag_run)
    score = run.key(iteration, "score")
    airflow.wait("score", lambda: Path(run.folder).is_dir() and run.journal.ref(score), 600)
    airflow.wait("its task", lambda: states(airflow, dag_run)["score"] == "success", 60)
    assert len(warm_jobs(airflow)) == 1
    time.sleep(STILL_S)
    assert (
        not is_running(run, iteration, "train", "team") and run.journal.ref(run.key(iteration, "train", "team")) is None
    )


def test_a_stage_waits_for_a_slot_of_its_pool_and_a_cleared_one_is_not_done_again(
    airflow: LocalAirflow, run: Run
) -> None:
    stand_before_train(airflow, run, "pooled", 1)
    airflow.ask(
        f"/dags/{DAG}/clearTaskInstances",
        "POST",
        dag_run_id="pooled",
        task_ids=["collect"],
        dry_run=False,
        only_failed=False,
    )
    airflow.wait("collect again", lambda: states(airflow, "pooled")["collect"] == "success", 120)
    set_slots(airflow, 1)
    airflow.wait("the DAG run", lambda: airflow.state(DAG, "pooled") == "success", 300)
    assert not warm_jobs(airflow)
    rows = rows_of(run)
    assert {row.token for row in rows.values() if row.iteration == 1} == {1}, "no stage was begun twice"
    assert {row.owner for row in rows.values() if row.iteration == 1 and row.stage in ("collect", "train", "sync")} == {
        rows[str(run.key(1, "collect"))].owner
    }, "one warm job did them"


def test_a_paused_dag_does_nothing_more_and_goes_on_where_it_was(airflow: LocalAirflow, run: Run) -> None:
    set_slots(airflow, 1)
    airflow.trigger(DAG, "paused")
    airflow.wait("collect", lambda: is_running(run, 2, "collect"), 300)
    airflow.pause(DAG, is_paused=True)
    airflow.wait("the end of collect", lambda: run.journal.ref(run.key(2, "collect")), 120)
    time.sleep(STILL_S)
    later = [row for row in run.journal.stages(run.run_id, 2) if row.stage in ("train", "sync", "evaluate")]
    assert not later, "score may have been asked for before the pause, what follows it not"
    airflow.pause(DAG, is_paused=False)
    airflow.wait("the DAG run", lambda: airflow.state(DAG, "paused") == "success", 400)
    assert not warm_jobs(airflow)


def test_a_dag_run_that_is_marked_failed_leaves_nothing_running(airflow: LocalAirflow, run: Run) -> None:
    set_slots(airflow, 0)
    stand_before_train(airflow, run, "between", 3)
    airflow.ask(f"/dags/{DAG}/dagRuns/between", "PATCH", state="failed")
    airflow.wait("the end of its job", lambda: not warm_jobs(airflow), 60)
    assert run.journal.ref(run.key(3, "train", "team")) is None

    set_slots(airflow, 1)
    airflow.trigger(DAG, "inside")
    airflow.wait("train", lambda: is_running(run, 3, "train", "team"), 300)
    airflow.ask(f"/dags/{DAG}/dagRuns/inside", "PATCH", state="failed")
    airflow.wait("the end of its job", lambda: not warm_jobs(airflow), 60)

    airflow.trigger(DAG, "after")
    airflow.wait("the DAG run", lambda: airflow.state(DAG, "after") == "success", 400)
    assert run.journal.ref(run.key(3, "train", "team")) is not None
