"""A real Airflow (scheduler, triggerer, API) and a Ray head train the small run; beside it the local runner.

reference:  troupe train, iterations 1 and 2, a cluster of its own (`undisturbed`)
phase 1:    Airflow alone, on schedule: 1, whose train job is killed, then it skips and says why
phase 2:    the local runner and Airflow at once on 2; the local one is killed in train, Airflow finishes it
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipelines.cluster.job_api import JobApi
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from tests.chaos import victims
from tests.e2e.airflow_client import LocalAirflow
from tests.e2e.local_runs import CONFIG, distance, is_running, keys, kill_tree, report_of, rows_of

TROUPE = str(Path(sys.executable).parent / "troupe")
DAG = "train_team__small"
STAGES = ("collect", "score", "train", "sync", "evaluate")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


def write_config(path: Path, *, iterations: int, root: Path, jobs: str = "iteration") -> Path:
    data = yaml.safe_load(CONFIG.read_text())
    schedule = {
        "cron": "@continuous",
        "max_rejections": 9,  # two rejections in a row, as it may be, are no reason to skip here
        "retry_delay_s": 2,
        "jobs": jobs,
    }
    data |= {"iterations": iterations, "storage": {"root": str(root)}, "schedule": schedule}
    path.write_text(yaml.safe_dump(data))
    return path


def train(config: Path, log: Path, address: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [TROUPE, "train", str(config), "--address", address],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        )


@dataclass
class Scene:
    """What the tests of this file share."""

    airflow: LocalAirflow
    config: Path
    root: Path
    reference: Run

    @property
    def run(self) -> Run:
        return Run(load_config(self.config))

    def wait_for_iteration(self, iteration: int, timeout_s: float) -> None:
        """Until the last task of the iteration's DAG run has ended."""
        run = self.run
        self.airflow.wait(
            f"iteration {iteration}",
            lambda: Path(run.folder).is_dir() and run.journal.ref(run.key(iteration, "record")),
            timeout_s,
        )


@pytest.fixture(scope="module")
def scene(undisturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("airflow")
    config = write_config(folder / "small.yaml", iterations=1, root=folder / "runs")
    (folder / "broken.yaml").write_text("run: broken\nschedul: {}\n")
    data = yaml.safe_load(config.read_text())
    data |= {"run": "follower", "schedule": {"on_assets": ["troupe://team/small"], "retries": 0}}
    (folder / "follower.yaml").write_text(yaml.safe_dump(data | {"cluster": {"address": "http://127.0.0.1:1"}}))
    configs = os.pathsep.join(str(folder / f"{name}.yaml") for name in ("small", "broken", "follower"))
    # Each reading of the DAGs is a process of its own for each file; no test waits for a second one.
    seldom = {"AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600"}
    with LocalAirflow(folder / "cache", configs, seldom) as airflow:
        yield Scene(airflow, config, folder / "runs", undisturbed)


@pytest.mark.test
def test_a_broken_run_config_is_an_import_error_and_hides_no_dag(scene: Scene) -> None:
    errors = scene.airflow.wait("import error", lambda: scene.airflow.ask("/importErrors")["import_errors"], 180)
    assert [Path(e["filename"]).name for e in errors] == ["invalid_runs.py"]
    assert "broken.yaml: unknown key 'schedul': did you mean 'schedule'?" in errors[0]["stack_trace"]
    assert DAG in {d["dag_id"] for d in scene.airflow.ask("/dags")["dags"]}


@pytest.mark.test
def test_a_scheduled_iteration_killed_in_train_is_that_of_the_local_runner(scene: Scene) -> None:
    airflow, run = scene.airflow, scene.run
    airflow.pause(DAG, is_paused=False)
    airflow.wait("train", lambda: is_running(run, 1, "train", "team"), 600)
    killed = victims.find("troupe iterate", [airflow.head_pid])
    assert killed
    victims.kill(killed)
    scene.wait_for_iteration(1, 300)
    first = airflow.dag_runs(DAG)[0]["dag_run_id"]
    airflow.wait("the first DAG run", lambda: airflow.state(DAG, first) == "success", 150)
    assert airflow.xcom(DAG, first, "begin", "iteration") == 1
    tasks = {t["task_id"]: t["state"] for t in airflow.tasks(DAG, first)}
    assert {tasks[stage] for stage in ("begin", *STAGES, "gate", "record")} == {"success"}
    assert sorted((tasks["promote"], tasks["report"])) == ["skipped", "success"]
    assert keys(run, 1) == keys(scene.reference, 1)
    assert distance(run, scene.reference) < 1e-3
    rows, others = rows_of(run), rows_of(scene.reference)
    again = {name for name, row in rows.items() if row.token != 1}
    assert again == {str(run.key(1, "train", "team"))}, "only what was killed was begun again"
    assert rows.keys() >= {name for name, row in others.items() if row.iteration < 2 and "record" not in name}
    mine, theirs = report_of(run), report_of(scene.reference)
    assert mine["before"] == theirs["before"], "the same version 0 plays the same test tasks: equal to the bit"
    log = airflow.log(DAG, first, "collect")
    assert "collect of iteration 1 of run small" in log and "score of iteration" not in log
    assert "it1-train-team" in rows[str(run.key(1, "train", "team"))].owner, "the next try has a job of its own"
    assert '"num_episodes": 256' in log


def test_a_schedule_with_nothing_left_to_do_skips_and_says_why(scene: Scene) -> None:
    airflow = scene.airflow
    skipped = airflow.wait("a second DAG run", lambda: airflow.dag_runs(DAG)[1:], 150)[0]["dag_run_id"]
    airflow.wait("its end", lambda: airflow.state(DAG, skipped) == "success", 180)
    airflow.pause(DAG, is_paused=True)
    assert {t["state"] for t in airflow.tasks(DAG, skipped)} == {"skipped"}
    assert "iteration 1 of 1 is done" in airflow.xcom(DAG, skipped, "begin", "skip")


def test_two_schedulers_at_once_double_nothing_and_airflow_finishes_what_a_killed_one_began(scene: Scene) -> None:
    airflow, log = scene.airflow, scene.root / "local.log"
    write_config(scene.config, iterations=2, root=scene.root, jobs="stage")  # so that the local runner catches up
    run = scene.run
    before = rows_of(run)

    # Airflow has fixed its iteration and is on its way; the local runner, which is faster, goes along on the same one.
    airflow.pause(DAG, is_paused=False)
    airflow.wait("its second iteration", lambda: latest_iteration(airflow) == 2, 480)
    local = train(scene.config, log, airflow.ray_address)
    deadline = time.monotonic() + 240
    while not begun_here(run, 2, ("train", "sync", "evaluate")):
        assert local.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)
    kill_tree(local.pid)
    scene.wait_for_iteration(2, 480)
    airflow.pause(DAG, is_paused=True)

    rows = rows_of(run)
    assert {name: row for name, row in rows.items() if name in before} == before, "finished stages are left alone"
    mine = {name: row for name, row in rows.items() if row.iteration == 2}
    interrupted = {name for name, row in mine.items() if row.token != 1}
    assert len(interrupted) <= 1, "only what the killed one was at was begun a second time"
    workers = {row.owner.split()[0] for row in mine.values() if row.stage in STAGES}  # `measure` may have begun by now
    assert "Ray" in workers and (interrupted or len(workers) > 1), "both did some of it"
    ids = keys(run, 2)
    assert len(ids) == len(set(ids)) == 256 and ids == keys(scene.reference, 2)
    assert run.trained(2)["team"].version == 2
    assert distance(run, scene.reference) < 1e-3


def test_a_team_is_moved_by_hand_after_approval_and_its_asset_triggers_who_follows_it(scene: Scene) -> None:
    airflow, run, dag, follower = scene.airflow, scene.run, "promote_team__small", "train_team__follower"
    airflow.pause(dag, is_paused=False)
    airflow.pause(follower, is_paused=False)
    assert airflow.dag_runs(follower) == []
    with pytest.raises(AssertionError, match=r"400 .*team_version"):
        airflow.trigger(dag, "wrong", team_version=0, reason="to see it refused")
    airflow.trigger(dag, "by-hand", team_version=2, reason="to see it move")
    approval = f"/dags/{dag}/dagRuns/by-hand/taskInstances/approve/-1/hitlDetails"
    asked = airflow.wait("the question", lambda: airflow.asked(approval), 150)
    assert asked["subject"] == "Make team version 2 of small the champion?"
    assert asked["body"] == "Reason: to see it move"
    # A person takes longer than this. Airflow takes a task for failed, and asks again, if it is answered before its
    # process was seen to have ended.
    time.sleep(5)
    airflow.ask(approval, "PATCH", chosen_options=["Approve"], params_input={})
    airflow.wait("the move", lambda: airflow.state(dag, "by-hand") == "success", 180)
    assert run.journal.value("small", "champion")["team_version"] == 2
    assert run.registry.alias("small", "champion") == 2
    (event, *_) = airflow.ask("/assets/events?order_by=-timestamp")["asset_events"]
    assert (event["uri"], event["extra"]["team_version"]) == ("troupe://team/small", 2)
    (triggered,) = airflow.wait("the follower's DAG run", lambda: airflow.dag_runs(follower), 150)
    assert triggered["run_type"] == "asset_triggered"
    airflow.pause(follower, is_paused=True)


def test_a_task_that_is_marked_failed_stops_its_job_and_waits_for_the_engines_are_said(scene: Scene) -> None:
    airflow, run, dag = scene.airflow, scene.run, "evaluate_team__small"
    api = JobApi(airflow.jobs_url)
    airflow.pause(dag, is_paused=False)
    with run.journal.hold("small", "engines", owner="a test"):
        airflow.trigger(dag, "killed")
        (job,) = airflow.wait("the job", lambda: [j for j in api.jobs() if j.status == "RUNNING"], 150)
        airflow.ask(f"/dags/{dag}/dagRuns/killed/taskInstances/watch", "PATCH", new_state="failed")
        airflow.wait("its stop", lambda: api.job(job.submission_id).status == "STOPPED", 30)
    airflow.trigger(dag, "again")
    airflow.wait("the evaluation", lambda: airflow.state(dag, "again") == "success", 180)
    assert (
        run.journal.value("small", "watched")["team_version"] == run.journal.value("small", "champion")["team_version"]
    )


def latest_iteration(airflow: LocalAirflow) -> int:
    """That of the latest DAG run; 0 while it has none."""
    dag_run = airflow.dag_runs(DAG)[-1]["dag_run_id"]
    states = {task["task_id"]: task["state"] for task in airflow.tasks(DAG, dag_run)}
    return int(airflow.xcom(DAG, dag_run, "begin", "iteration")) if states.get("begin") == "success" else 0


def begun_here(run: Run, iteration: int, stages: Sequence[str]) -> bool:
    """True while a process that is no Ray job is at one of these stages of the iteration."""
    rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage in stages]
    return any(row.status == "running" and not row.owner.startswith("Ray job") for row in rows)
