"""train_team: one DAG per run config that has a `schedule`; one DAG run is one iteration.

    begin ──> collect ──> score ──> train (mapped over model groups) ──> sync ──> evaluate ──> gate ─┬─> promote ─┬─> record
                                                                                                      └─> report ──┘

`begin` fixes the iteration or skips the DAG run, saying why. `promote` moves the champion and updates the asset
`troupe://team/<run>`; `report` writes down why the champion stays.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Asset, Param, task

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.timing import default_args, start_of, timetable


def train_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    settings = run.config.schedule
    assert settings is not None, "find_runs gives scheduled runs only"
    dag = DAG(
        dag_id=f"train_team__{run.config.run}",
        description=f"One iteration of {run.config.run}: collect, score, train, sync, evaluate, promote",
        doc_md=f"Run config: `{run.path}`.\n\n{__doc__}",
        schedule=timetable(settings.cron, settings, settings.on_assets),
        start_date=start_of(settings),
        catchup=False,
        max_active_runs=1,  # a DAG run that is late waits for the one before
        tags=["troupe", run.config.run],
        params={
            "force": Param(
                False,
                type="boolean",
                title="Train anyway",
                description="Train even where the schedule would skip: target reached, nothing new, gate rejected.",
            )
        },
        default_args=default_args(settings),
    )

    def job(task_id: str, command: str, **kwargs: Any) -> RayJobOperator:
        return RayJobOperator(task_id=task_id, command=command, run_config=run.json, folder=run.folder, **kwargs)

    with dag:
        begin = job("begin", "begin", multiple_outputs=True)
        iteration, since = _result(begin, "iteration"), _result(begin, "since")
        collect = job("collect", "stage collect", iteration=iteration, since=since)
        score = job("score", "stage score", iteration=iteration, since=since)
        train = RayJobOperator.partial(
            task_id="train",
            command="stage train",
            run_config=run.json,
            folder=run.folder,
            iteration=iteration,
            since=since,
            map_index_template="{{ task.model_group }}",
        ).expand(model_group=list(run.config.model_groups))
        sync = job("sync", "stage sync", iteration=iteration, since=since)
        evaluate = job("evaluate", "stage evaluate", iteration=iteration, since=since, multiple_outputs=True)
        team = Asset(name=f"team/{run.config.run}", uri=f"troupe://team/{run.config.run}")
        promote = job("promote", "stage promote", iteration=iteration, since=since, outlets=[team])
        report = job("report", "stage promote", iteration=iteration, since=since)
        record = job(
            "record",
            "record",
            iteration=iteration,
            since=since,
            arguments=["--run", run.config.run, "--iteration", iteration],
            trigger_rule="none_failed_min_one_success",
        )

        @task.branch(task_id="gate")
        def gate(verdict: str, condition: str) -> str:
            print(f"gate: {verdict}: {condition}")
            return "promote" if verdict == "promote" else "report"

        decided = gate(_result(evaluate, "verdict"), _result(evaluate, "condition"))
        begin >> collect >> score >> train >> sync >> evaluate >> decided >> [promote, report] >> record
    return dag


def _result(job: RayJobOperator, key: str) -> Any:
    """One value of the ref that a task hands on."""
    return job.output[key]  # type: ignore[index]


for _run in find_runs()[0]:
    globals()[f"train_team__{_run.config.run}"] = train_team(_run)
