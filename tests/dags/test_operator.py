"""The operator and its trigger against a stand-in for Ray's dashboard: what is submitted, logged, returned and raised."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_server import JobServer, job_server

from pipelines.cluster.jobs import _mark
from pipelines.config.run_config import load_config
from pipelines.config.schedule import ScheduleConfig

SMALL = Path(__file__).parents[1] / "e2e" / "small.yaml"

pytestmark = [pytest.mark.test, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module", autouse=True)
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AIRFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        environment.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "0")
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with job_server() as found:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", found.url)
        yield found


class Pushed(SimpleNamespace):
    """A task instance that keeps what is pushed."""

    def xcom_push(self, key: str, value: Any) -> None:
        setattr(self, key, value)


def context(run_id: str = "scheduled__1", *, clear_number: int = 0, **params: Any) -> dict[str, Any]:
    dag_run = SimpleNamespace(dag_id="train_team__small", run_id=run_id, clear_number=clear_number)
    return {"dag_run": dag_run, "params": params, "ti": Pushed(), "outlet_events": {}}


def operator(command: str, **more: Any) -> Any:
    from dags.ray_job import RayJobOperator

    config = load_config(SMALL).model_copy(update={"schedule": ScheduleConfig(stage_timeout_s=5000)})
    given = {"in_task_s": 0.0} | more
    return RayJobOperator(task_id="it", command=command, run_config=config.model_dump_json(), folder="/work", **given)


def deferred(task: Any, given: dict[str, Any]) -> Any:
    from airflow.sdk.exceptions import TaskDeferred

    with pytest.raises(TaskDeferred) as raised:
        task.execute(given)
    assert raised.value.method_name == "resume"
    return raised.value.trigger


def event_of(trigger: Any) -> dict[str, Any]:
    async def first() -> Any:
        async for event in trigger.run():
            return event.payload

    return asyncio.run(asyncio.wait_for(first(), 30))


def test_a_stage_is_submitted_followed_and_handed_on(
    server: JobServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_LOG", "json")
    monkeypatch.setenv("TROUPE_RAY_DASHBOARD_URL", "https://ray.example")
    given = context()
    trigger = deferred(operator("stage train", iteration=2, model_group="team"), given)
    (job,) = server.requests
    assert job == "troupe-small-it2-train-team-a0"
    links = server.requests[job]["runtime_env"]["env_vars"]
    assert links["TROUPE_DAG_RUN_URL"].endswith("/dags/train_team__small/runs/scheduled__1")
    assert (links["TROUPE_RAY_DASHBOARD_URL"], links["TROUPE_LOG"]) == ("https://ray.example", "json")

    server.put(job, "SUCCEEDED", 'epoch 1\ntroupe-ref: {"model": {"version": 2}}\n', driver_exit_code=0)
    event = event_of(trigger)
    assert "epoch 1" in capsys.readouterr().out
    assert operator("stage train").resume(given, event) == {"model": {"version": 2}}


def test_a_short_job_is_waited_for_in_the_task(server: JobServer, capsys: pytest.CaptureFixture[str]) -> None:
    job = "troupe-small-it2-score-a0"

    def run_job() -> None:
        while job not in server.requests:
            time.sleep(0.01)
        server.put(job, "RUNNING", "credit 1 of 2\n")
        while job not in server.read_logs or not server.read_logs[job]:
            time.sleep(0.01)
        server.put(job, "SUCCEEDED", 'credit 1 of 2\ncredit 2 of 2\ntroupe-ref: {"rows": 8}\n', driver_exit_code=0)

    cluster = threading.Thread(target=run_job)
    cluster.start()
    assert operator("stage score", iteration=2, in_task_s=30.0).execute(context()) == {"rows": 8}
    cluster.join()
    shown = capsys.readouterr().out
    assert [shown.count(line) for line in ("credit 1 of 2", "credit 2 of 2")] == [1, 1]


def test_a_job_that_outlasts_the_wait_is_deferred_and_no_line_comes_twice(
    server: JobServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "troupe-small-it2-collect-a0"
    deferred(operator("stage collect", iteration=2), context())
    server.put(job, "RUNNING", "episode 1\n")
    trigger = deferred(operator("stage collect", iteration=2, in_task_s=0.3), context())
    server.put(job, "SUCCEEDED", "episode 1\nepisode 2\ntroupe-ref: {}\n", driver_exit_code=0)
    assert event_of(trigger)["ended"]["status"] == "SUCCEEDED"
    shown = capsys.readouterr().out
    assert [shown.count(line) for line in ("episode 1", "episode 2")] == [1, 1]


def test_a_task_that_is_killed_while_it_waits_stops_its_job(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowException

    task = operator("stage collect", iteration=1, in_task_s=30.0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(task.execute, context())
        while not server.read_logs:
            time.sleep(0.01)
        task.on_kill()
        (job,) = server.stopped
        server.put(job, "STOPPED")
        with pytest.raises(AirflowException, match="killed while it waited"):
            waiting.result(timeout=10)


def test_a_task_that_is_killed_before_it_has_a_job_stops_the_one_that_it_then_has(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowException

    job = iterating(server)
    task = operator("stage collect", iteration=2, job=job, in_task_s=30.0)
    task.on_kill()
    assert not server.stopped
    with pytest.raises(AirflowException, match="killed while it waited"):
        task.execute(context())
    assert server.stopped == [job]


ITERATE_LOG = """collect of iteration 2 of run small
episode 1
troupe-ref collect: {"num_tokens": 5}
score of iteration 2 of run small
troupe-ref score: {"outcome": 0.5}
train of iteration 2 of run small
troupe-ref train/a: {"model": {"version": 2}}
"""


def iterating(server: JobServer) -> str:
    """The job of iteration 2, in stage train."""
    job = deferred(operator("iterate"), context()).job.submission_id
    server.put(job, "RUNNING", 'troupe-ref begin: {"iteration": 2, "since": 1.0}\n' + ITERATE_LOG)
    return job


def test_an_iteration_is_one_job_whose_parts_are_the_results_of_its_tasks(
    server: JobServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job = iterating(server)
    assert "troupe iterate --run small --claim" in server.requests[job]["entrypoint"]
    assert operator("iterate").execute(context()) == {"iteration": 2, "since": 1.0, "job": job}
    capsys.readouterr()
    following = {"iteration": 2, "job": job}
    assert not server.packages, "nobody has asked for a stage"
    assert operator("stage collect", **following).execute(context()) == {"num_tokens": 5}
    shown = capsys.readouterr().out
    assert "episode 1" in shown and "score of" not in shown and "begin:" not in shown
    assert operator("stage score", **following).execute(context()) == {"outcome": 0.5}
    assert operator("stage train", model_group="a", **following).execute(context()) == {"model": {"version": 2}}
    assert len(server.requests) == 1
    trigger = deferred(operator("stage train", model_group="b", **following), context())
    asked = {_mark(job, part) for part in ("collect", "score", "train/a", "train/b")}
    assert set(server.packages) == asked, "each task has asked for its own"
    server.put(
        job, "RUNNING", server.logs[job] + 'troupe-ref train/b: {"model": {"version": 3}}\nsync of iteration 2\n'
    )
    assert event_of(trigger)["ended"]["ref"] == {"model": {"version": 3}}
    assert "sync of" not in capsys.readouterr().out


def test_a_stage_at_which_the_iterations_job_ended_is_repeated_in_a_job_of_its_own(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    job = iterating(server)
    log = server.logs[job] + "troupe: the trainer's process died\n"
    task = operator("stage train", iteration=2, model_group="b", job=job)
    trigger = deferred(task, context())
    server.put(job, "FAILED", log, driver_exit_code=1)
    with pytest.raises(AirflowException, match="the trainer's process died") as raised:
        task.resume(context(), event_of(trigger))
    assert not isinstance(raised.value, AirflowFailException)
    assert operator("stage score", iteration=2, job=job).execute(context()) == {"outcome": 0.5}, "it was done before"
    assert deferred(task, context()).job.submission_id == "troupe-small-it2-train-b-a0"
    assert (
        deferred(operator("stage sync", iteration=2, job=job), context()).job.submission_id
        == "troupe-small-it2-sync-a0"
    )


def test_where_an_iterations_job_is_stopped_a_task_goes_on_in_a_job_of_its_own_unless_it_is_killed_itself(
    server: JobServer,
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred

    job = iterating(server)
    killed, sibling = (
        operator("stage train", iteration=2, model_group="b", job=job, in_task_s=seconds) for seconds in (30.0, 0.0)
    )
    trigger = deferred(sibling, context())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(killed.execute, context())
        while killed._job is None:
            time.sleep(0.01)
        killed.on_kill()
        assert server.stopped == [job]
        server.put(job, "STOPPED", server.logs[job])
        with pytest.raises(AirflowException, match="killed while it waited") as raised:
            waiting.result(timeout=10)
    assert not isinstance(raised.value, AirflowFailException) and len(server.requests) == 1
    with pytest.raises(TaskDeferred) as going_on:
        sibling.resume(context(), event_of(trigger))
    assert going_on.value.trigger.job.submission_id == "troupe-small-it2-train-b-a0"


def test_a_schedule_that_trains_nothing_skips_with_the_reason_whoever_begins(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    job = deferred(operator("iterate"), context()).job.submission_id
    server.put(job, "SUCCEEDED", 'troupe-ref begin: {"skip": "nothing new"}\n', driver_exit_code=0)
    with pytest.raises(AirflowSkipException, match="nothing new"):
        operator("iterate").execute(context())


def test_a_restarted_trigger_is_made_from_what_it_serializes(server: JobServer) -> None:
    from dags.ray_job import TroupeJobTrigger

    trigger = deferred(operator("stage score", iteration=1), context())
    path, kwargs = trigger.serialize()
    assert path == f"{TroupeJobTrigger.__module__}.{TroupeJobTrigger.__name__}"
    server.put(kwargs["submission_id"], "SUCCEEDED", "troupe-ref: {}\n")
    assert event_of(TroupeJobTrigger(**kwargs))["ended"]["status"] == "SUCCEEDED"


def test_a_restarted_task_attaches_to_the_job_that_runs(server: JobServer) -> None:
    first = deferred(operator("stage collect", iteration=1), context())
    server.put(first.job.submission_id, "RUNNING")
    second = deferred(operator("stage collect", iteration=1), context())
    assert second.job.submission_id == first.job.submission_id
    assert len(server.requests) == 1


def test_a_cleared_task_that_meets_its_job_on_the_way_down_submits_the_next_attempt(server: JobServer) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    cleared = deferred(operator("stage collect", iteration=1), context())
    server.put(cleared.job.submission_id, "RUNNING")
    trigger = deferred(operator("stage collect", iteration=1), context())
    server.put(cleared.job.submission_id, "STOPPED")
    with pytest.raises(TaskDeferred) as raised:
        operator("stage collect", iteration=1).resume(context(), event_of(trigger))
    assert raised.value.trigger.job.submission_id == cleared.job.submission_id.replace("-a0", "-a1")
    assert raised.value.trigger.job.is_new


def test_begin_is_claimed_by_its_dag_run_and_skips_with_the_reason(server: JobServer) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    one, again, two = (deferred(operator("begin"), context(run)).job.submission_id for run in ("a", "a", "b"))
    assert one == again != two
    assert "--claim train_team__small/a" in server.requests[one]["entrypoint"]
    assert "--force" not in server.requests[one]["entrypoint"]
    forced = deferred(operator("begin"), context("c", force=True)).job.submission_id
    assert server.requests[forced]["entrypoint"].endswith("--force")

    given = context()
    outcome = {"submission_id": one, "status": "SUCCEEDED", "exit_code": 0, "ref": {"skip": "nothing new"}, "error": ""}
    fields = {"address": server.url, "submission_id": one, "deadline": 0.0, "is_new": True}
    with pytest.raises(AirflowSkipException, match="nothing new"):
        operator("begin").resume(given, {"ended": outcome, "fields": fields})
    assert given["ti"].skip == "nothing new"


def test_work_by_hand_belongs_to_its_dag_run_and_quotes_what_people_type(server: JobServer) -> None:
    task = operator("promote", arguments=["--run", "small", "--reason", "a; rm -rf /", ""])
    one, two = (deferred(task, context(run)).job.submission_id for run in ("a", "b"))
    assert one != two
    assert server.requests[one]["entrypoint"].endswith("troupe promote --run small --reason 'a; rm -rf /'")


def test_work_by_hand_is_done_again_where_its_task_was_cleared_and_not_where_it_is_retried(server: JobServer) -> None:
    task = operator("watch", arguments=["--run", "small"])
    first = deferred(task, context()).job.submission_id
    server.put(first, "SUCCEEDED", 'troupe-ref: {"state": "alarm"}\n')
    assert task.execute(context()) == {"state": "alarm"}
    assert deferred(task, context(clear_number=1)).job.submission_id != first


def test_the_asset_of_a_team_is_updated_where_its_champion_moved_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    from dags.run_configs import ScheduledRun
    from dags.train_team import train_team

    config = load_config(SMALL).model_copy(update={"schedule": ScheduleConfig()})
    task = train_team(ScheduledRun(path=str(SMALL), config=config, folder="")).get_task("in_service")
    (asset,) = task.outlets
    events = {asset: SimpleNamespace(extra={})}
    moved = {"verdict": "promote", "condition": "better", "team_version": 3}
    task.python_callable(moved, outlet_events=events)
    assert events[asset].extra == moved
    with pytest.raises(AirflowSkipException, match="the champion stays: inconclusive: somebody moved it"):
        task.python_callable({"verdict": "inconclusive", "condition": "somebody moved it"}, outlet_events=events)


@pytest.mark.parametrize(
    ("status", "code", "is_repeated"),
    [
        ("FAILED", 1, True),
        ("FAILED", 75, True),
        ("FAILED", None, True),
        ("FAILED", 2, False),
        ("FAILED", 3, False),
        ("STOPPED", None, False),
    ],
)
def test_how_a_job_fails_decides_whether_airflow_repeats_it(
    server: JobServer, status: str, code: int | None, is_repeated: bool
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    trigger = deferred(operator("stage collect", iteration=1), context())
    log = "troupe: out of memory in EngineCore: lower serve.kv_cache_gib\n"
    server.put(trigger.job.submission_id, status, log, driver_exit_code=code)
    with pytest.raises(
        AirflowException, match="lower serve.kv_cache_gib" if status == "FAILED" else "by hand"
    ) as raised:
        operator("stage collect").resume(context(), event_of(trigger))
    assert isinstance(raised.value, AirflowFailException) is not is_repeated


def test_a_cluster_that_is_down_is_tried_again_and_a_wrong_token_is_not(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    server.token = "secret"
    with pytest.raises(AirflowFailException, match="wants a token"):
        operator("stage collect", iteration=1).execute(context())
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(AirflowException, match="no Ray cluster answers") as raised:
        operator("stage collect", iteration=1).execute(context())
    assert not isinstance(raised.value, AirflowFailException)


def test_clearing_or_killing_a_task_stops_its_job(server: JobServer) -> None:
    task = operator("stage collect", iteration=1)
    trigger = deferred(task, context())
    asyncio.run(trigger.on_kill())
    task.on_kill()
    assert server.stopped == [trigger.job.submission_id] * 2
    operator("stage collect").on_kill()
