"""The package of Ray jobs as Airflow tasks: what is submitted, followed, returned and raised, and its example on a real cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_server import JobServer, job_server

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.test, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module", autouse=True)
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AIRFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        environment.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "0")
        environment.delenv("RAY_AUTH_TOKEN", raising=False)
        environment.setenv("RAY_AUTH_TOKEN_PATH", "/nonexistent")
        yield


@pytest.fixture
def server() -> Iterator[JobServer]:
    with job_server() as found:
        yield found


def context(*, map_index: int = -1, clear_number: int = 0) -> dict[str, Any]:
    dag_run = SimpleNamespace(dag_id="daily", run_id="scheduled__2026-01-01T00:00:00+00:00", clear_number=clear_number)
    return {"dag_run": dag_run, "ti": SimpleNamespace(task_id="count", map_index=map_index)}


def operator(server: JobServer, **more: Any) -> Any:
    from dags.ray_jobs import RayJobOperator

    given = {"entrypoint": "python count.py", "address": server.url, "in_task_s": 0.0} | more
    return RayJobOperator(task_id="count", **given)


def deferred(task: Any, given: dict[str, Any]) -> Any:
    from airflow.sdk.exceptions import TaskDeferred

    with pytest.raises(TaskDeferred) as raised:
        task.execute(given)
    return raised.value.trigger


def event_of(trigger: Any) -> dict[str, Any]:
    async def first() -> Any:
        async for event in trigger.run():
            return event.payload

    return asyncio.run(asyncio.wait_for(first(), 30))


def test_a_job_is_submitted_followed_by_a_trigger_made_again_and_its_result_returned(
    server: JobServer, capsys: pytest.CaptureFixture[str]
) -> None:
    task = operator(server, runtime_env={"pip": ["x"]}, reserves={"entrypoint_num_cpus": 2}, metadata={"team": "a"})
    trigger = deferred(task, context())
    ((job, request),) = server.requests.items()
    assert job == trigger.job.submission_id and job.startswith("daily-scheduled__2026-01-01T00-00-00-00-00-count-")
    assert request == {
        "entrypoint": "python count.py",
        "submission_id": job,
        "entrypoint_num_cpus": 2,
        "runtime_env": {"pip": ["x"]},
        "metadata": {"team": "a"},
    }
    server.put(job, "RUNNING", "row 1\n")
    path, fields = trigger.serialize()
    trigger.job.poll()
    server.put(job, "SUCCEEDED", 'row 1\n100% AIRFLOW_RESULT: {"rows": 2}\n', driver_exit_code=0)
    again = type(trigger)(**fields)
    assert path == "dags.ray_jobs.operator.RayJobTrigger"
    assert task.resume(context(), event_of(again)) == {"rows": 2}
    assert capsys.readouterr().out.count("row 1") == 1


def test_who_was_restarted_attaches_a_retry_begins_again_and_so_does_a_cleared_task(server: JobServer) -> None:
    task = operator(server)
    first = deferred(task, context()).job
    server.put(first.submission_id, "RUNNING")
    attached = deferred(task, context()).job
    assert (attached.submission_id, first.is_new, attached.is_new) == (first.submission_id, True, False)
    server.put(first.submission_id, "FAILED")
    retried = deferred(task, context()).job
    assert retried.submission_id == first.submission_id.removesuffix("0") + "1"
    server.put(retried.submission_id, "SUCCEEDED", "AIRFLOW_RESULT: 7\n")
    assert task.execute(context()) == 7, "it was done before"
    names = {deferred(task, given).job.submission_id for given in (context(clear_number=1), context(map_index=3))}
    assert len(names) == 2 and not names & {first.submission_id, retried.submission_id}


def test_a_job_that_somebody_else_submits_at_the_same_time_is_followed(server: JobServer) -> None:
    server.loses_race_to = {"status": "SUCCEEDED", "log": "AIRFLOW_RESULT: [1]\n"}
    assert operator(server).execute(context()) == [1]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        ("FAILED", 1, "AirflowException"),
        ("FAILED", None, "AirflowException"),
        ("FAILED", 2, "AirflowFailException"),
        ("FAILED", 99, "AirflowSkipException"),
        ("STOPPED", None, "AirflowFailException"),
    ],
)
def test_how_a_job_ended_decides_what_becomes_of_the_task(
    server: JobServer, status: str, code: int | None, error: str
) -> None:
    from airflow.sdk import exceptions

    task = operator(server)
    trigger = deferred(task, context())
    server.put(trigger.job.submission_id, status, "no such file: a.csv\n", driver_exit_code=code)
    with pytest.raises(exceptions.AirflowException, match=r"no such file: a\.csv") as raised:
        task.resume(context(), event_of(trigger))
    assert type(raised.value) is getattr(exceptions, error)


def test_a_stopped_job_of_a_try_before_is_followed_by_the_next_attempt(server: JobServer) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    task = operator(server)
    first = deferred(task, context()).job.submission_id
    trigger = deferred(task, context())
    server.put(first, "STOPPED")
    with pytest.raises(TaskDeferred) as raised:
        task.resume(context(), event_of(trigger))
    assert raised.value.trigger.job.submission_id == first.removesuffix("0") + "1"


def test_a_job_is_stopped_at_its_deadline_with_its_task_and_by_the_trigger(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowException

    late = operator(server, timeout_s=-1.0)
    with pytest.raises(AirflowException, match="TIMEOUT"):
        late.execute(context())
    (job,) = server.stopped
    late.on_kill()
    asyncio.run(deferred(operator(server), context()).on_kill())
    assert server.stopped == [job] * 3


def test_what_may_pass_is_repeated_and_what_may_not_is_not(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    from dags.ray_jobs import operator as operator_module

    server.token = "secret"
    with pytest.raises(AirflowFailException, match="RAY_AUTH_TOKEN"):
        operator(server).execute(context())
    (tmp_path / "token").write_text("secret\n")
    with monkeypatch.context() as environment:
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        deferred(operator(server), context())
    trigger = deferred(operator(server, headers={"Authorization": "Bearer secret"}), context())
    assert trigger.serialize()[1]["headers"] == {"Authorization": "Bearer secret"}
    with pytest.raises(AirflowFailException, match="ray://head:10001"):
        operator(server, address="ray://head:10001").execute(context())
    with pytest.raises(AirflowException, match="no Ray cluster answers") as raised:
        operator(server, address="http://127.0.0.1:1").execute(context())
    assert type(raised.value) is AirflowException
    lost = type(trigger.job)("http://127.0.0.1:1", "x", deadline=0.0)
    assert lost.poll() == ("", None)
    monkeypatch.setattr(operator_module, "AWAY_S", 0.0)
    assert lost.poll()[1]["status"] == "AWAY"
    assert type(trigger.job)(server.url, "x", deadline=0.0, headers=trigger.job.headers).poll()[1]["status"] == "LOST"


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_local")
def test_the_example_runs_on_a_real_cluster_without_troupe(tmp_path: Path) -> None:
    import ray

    (tmp_path / "ray_jobs").symlink_to(ROOT / "dags" / "ray_jobs")
    (tmp_path / "dags").mkdir()
    shutil.copy(ROOT / "dags" / "ray_jobs" / "example_dag.py", tmp_path / "dags")
    dashboard = f"http://{ray.get_runtime_context().worker.node.address_info['webui_url']}"
    own = {
        "RAY_AUTH_TOKEN_PATH": str(Path.home() / ".ray" / "auth_token"),
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "RAY_API_SERVER_ADDRESS": dashboard,
        "PYTHONPATH": str(tmp_path),
    }
    light = "import sys, ray_jobs; assert not {'ray', 'pipelines', 'stores'} & set(sys.modules)"
    airflow = ["-m", "airflow"]
    for command in (["-c", light], [*airflow, "db", "migrate"], [*airflow, "dags", "test", "ray_jobs_example"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert "This cluster has 8.0 CPUs." in done.stdout + done.stderr
