"""train_team: one DAG per run config that has a `schedule`; one DAG run is one iteration.

    begin ──> collect ──> score ──> train (mapped over model groups) ──> sync ──> evaluate ──> gate ─┬─> promote ─┬─> record
                                                                                                      └─> report ──┘
    promote ──> in_service (asset troupe://team/<run>)
    begin ──> warm ──> (whatever becomes of the rest) ──> end

`begin` gives the DAG run its iteration, or skips the DAG run and says why. With `loop.max_lag` the next DAG run begins while this one
trains, and its stages wait for those of this one that they need. `promote` moves the champion, and `in_service` updates the
asset where it did: a canary, which is part of `promote`, may send the team back, and somebody may have moved the champion since
the gate. `end` stops the job of the iteration where it is still there: a DAG run that has ended, or was marked failed, leaves nothing
running. `report` records why the champion stays. `record` returns the check of the iteration's
figures (XCom `watch`); with `watch.on_alarm: fail` an alarm fails the DAG run (`watched`, `alarm`), and `begin` skips.
"""

from __future__ import annotations

import time
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, Param, task
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import stage_job, stage_pool, team_asset, team_dag, team_job
from pipelines.cluster.job_api import JobApi, address_of

STOP_S = 60.0
"""Ray ends a job by force 3 s after it was asked to; a busy machine is slower."""
FORCE = Param(
    False,
    type="boolean",
    title="Train anyway",
    description="Train even where the schedule would skip: target reached, nothing new, gate rejected.",
)


def train_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    dag = team_dag(
        run,
        "train_team",
        what=f"One iteration of {run.config.run}: collect, score, train, sync, evaluate, promote",
        doc=str(__doc__),
        cron=run.settings.cron,
        on_assets=run.settings.on_assets,
        max_active_runs=1 + run.config.loop.max_lag,
        params={"force": FORCE},
    )

    with dag:
        is_one_job = run.settings.jobs == "iteration"
        begin = team_job(run, "begin", "iterate" if is_one_job else "begin", multiple_outputs=True)
        iteration, since = _result(begin, "iteration"), _result(begin, "since")
        of_iteration = {"iteration": iteration, "since": since, "job": _result(begin, "job") if is_one_job else ""}
        collect = stage_job(run, "collect", **of_iteration)
        score = stage_job(run, "score", **of_iteration)
        train = RayJobOperator.partial(
            task_id="train",
            command="stage train",
            run_config=run.json,
            folder=run.folder,
            map_index_template="{{ task.model_group }}",
            **of_iteration,
            **stage_pool(run, "train"),
        ).expand(model_group=list(run.config.train_tasks))
        sync = stage_job(run, "sync", **of_iteration)
        evaluate = stage_job(run, "evaluate", **of_iteration, multiple_outputs=True)
        promote = stage_job(run, "promote", **of_iteration)
        report = stage_job(run, "report", stage="promote", **of_iteration)
        record = team_job(
            run,
            "record",
            **of_iteration,
            arguments=["--run", run.config.run, "--iteration", iteration],
            trigger_rule="none_failed_min_one_success",
            multiple_outputs=True,
        )

        @task.branch(task_id="gate")
        def gate(verdict: str, condition: str) -> str:
            print(f"gate: {verdict}: {condition}")
            return "promote" if verdict == "promote" else "report"

        decided = gate(_result(evaluate, "verdict"), _result(evaluate, "condition"))
        _update_asset(promote.output, team_asset(run))
        watch = getattr(run.config, "watch", None)  # the section of the extension, where a config has it
        if watch is not None and watch.on_alarm == "fail":
            _fail_on_alarm(_result(record, "watch"))
        begin >> collect >> score >> train >> sync >> evaluate >> decided >> [promote, report] >> record
        if is_one_job:
            # `begin` is no setup itself: `record` follows it, by another trigger rule than a setup allows.
            warm = EmptyOperator(task_id="warm").as_setup()
            begin >> warm >> collect
            record >> _end(run, of_iteration["job"]).as_teardown(setups=warm)
    return dag


def _end(run: ScheduledRun, job: Any) -> Any:
    """The task that stops the job of the iteration, and sees it end."""

    @task(task_id="end", retries=0)
    def end(job: str) -> None:
        api, deadline = JobApi(address_of(run.config.cluster)), time.monotonic() + STOP_S
        api.stop(job)
        while (left := api.job(job)) is not None and not left.has_ended:
            if time.monotonic() > deadline:
                raise AirflowFailException(f"Ray job {job} still runs {STOP_S:g} s after it was asked to stop")
            time.sleep(0.5)

    return end(job)


def _update_asset(promoted: Any, asset: Asset) -> None:
    """Adds the task that updates the team's asset where its champion moved."""

    @task(task_id="in_service", outlets=[asset])
    def in_service(promoted: Any, *, outlet_events: Any) -> None:
        if promoted["verdict"] != "promote":
            raise AirflowSkipException(f"the champion stays: {promoted['verdict']}: {promoted['condition']}")
        outlet_events[asset].extra = promoted

    in_service(promoted)


def _fail_on_alarm(check: Any) -> None:
    """Adds the tasks that fail the DAG run where the check of an iteration's figures says so."""

    @task.branch(task_id="watched")
    def watched(check: Any) -> str | None:
        return "alarm" if check["state"] == "alarm" else None

    @task(task_id="alarm", retries=0)
    def alarm(check: Any) -> None:
        raise AirflowFailException(f"an alarm holds the schedule: {check['reason']}")

    watched(check) >> alarm(check)


def _result(job: RayJobOperator, key: str) -> Any:
    """One value of the result that a task returns."""
    return job.output[key]  # type: ignore[index]


for _run in find_runs()[0]:
    globals()[f"train_team__{_run.config.run}"] = train_team(_run)
