"""evaluate_team: the champion on the test and sentinel tasks, on a schedule of its own (`schedule.evaluate`).

    watch: troupe watch --run RUN

It waits while a stage of `train_team` uses the engines. Its result is what `schedule.target_accuracy` is compared with.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.timing import default_args, start_of, timetable


def evaluate_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    settings, name = run.config.schedule, run.config.run
    assert settings is not None, "find_runs gives scheduled runs only"
    with DAG(
        dag_id=f"evaluate_team__{name}",
        description=f"The champion of {name} on test and sentinel tasks",
        doc_md=f"Run config: `{run.path}`.\n\n{__doc__}",
        schedule=timetable(settings.evaluate, settings),
        start_date=start_of(settings),
        catchup=False,
        max_active_runs=1,
        tags=["troupe", name],
        params={
            "team": Param(
                "champion",
                type="string",
                pattern="^(champion|candidate|[1-9][0-9]*)$",
                title="Team",
                description="champion, candidate, or a team version",
            )
        },
        default_args=default_args(settings),
    ) as dag:
        RayJobOperator(
            task_id="watch",
            command="watch",
            run_config=run.json,
            folder=run.folder,
            arguments=["--run", name, "--team", "{{ params.team }}"],
        )
    return dag


for _run in find_runs()[0]:
    globals()[f"evaluate_team__{_run.config.run}"] = evaluate_team(_run)
