"""evaluate_team: the champion on the test and sentinel tasks, on a schedule of its own (`schedule.evaluate`).

    watch: troupe watch --run RUN

It waits while a stage of `train_team` uses the engines. Its result is what `schedule.target_accuracy` is compared with.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

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
        team_job(run, "watch", arguments=["--run", name, "--team", "{{ params.team }}"])
    return dag


for _run in find_runs()[0]:
    globals()[f"evaluate_team__{_run.config.run}"] = evaluate_team(_run)
