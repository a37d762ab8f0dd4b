"""evaluate_team: check the champion on the test and sentinel tasks, on a schedule of its own (`schedule.evaluate`).

    watch: troupe watch --run RUN ──> state ──> sound | alarm | learning

It waits while a stage of `train_team` uses the engines. Its accuracy is compared with `schedule.target_accuracy`. A figure
outside the range that is usual for the champion (section `watch`) fails the DAG run with the reason; `learning` means that
some figures have too little history to be judged yet.
"""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param, task
from airflow.sdk.exceptions import AirflowFailException

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_dag, team_job


def evaluate_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    name = run.config.run
    with team_dag(
        run,
        "evaluate_team",
        what=f"The champion of {name} on test and sentinel tasks",
        doc=str(__doc__),
        cron=run.settings.evaluate,
        params={
            "team": Param(
                "champion",
                type="string",
                pattern="^(champion|candidate|[1-9][0-9]*)$",
                title="Team",
                description="champion, candidate, or a team version",
            )
        },
    ) as dag:

        @task.branch(task_id="state")
        def state(check: Any) -> str:
            return str(check["state"])

        @task(task_id="alarm", retries=0)
        def alarm(check: Any) -> None:
            raise AirflowFailException(f"team version {check['team_version']}: {check['reason']}")

        watch = team_job(run, "watch", arguments=["--run", name, "--team", "{{ params.team }}"])
        state(watch.output) >> [
            EmptyOperator(task_id="sound"),
            alarm(watch.output),
            EmptyOperator(task_id="learning"),
        ]
    return dag


for _run in find_runs()[0]:
    globals()[f"evaluate_team__{_run.config.run}"] = evaluate_team(_run)
