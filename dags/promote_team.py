"""promote_team: make a registered team version the champion, by hand.

    approve (a person, in Airflow's page) ──> promote: troupe promote ... ──> asset troupe://team/<run>

The engines prove that they serve its weights before the champion moves.
"""

from __future__ import annotations

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_asset, team_dag, team_job


def promote_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    name = run.config.run
    with team_dag(
        run,
        "promote_team",
        what=f"Make a team version of {name} the champion",
        doc=str(__doc__),
        params={
            "team_version": Param(type="integer", minimum=1, title="Team version", description="As MLflow numbers it"),
            "reason": Param(type="string", minLength=3, maxLength=500, title="Reason", description="For the history"),
        },
    ) as dag:
        approve = ApprovalOperator(
            task_id="approve",
            subject=f"Make team version {{{{ params.team_version }}}} of {name} the champion?",
            body="Reason: {{ params.reason }}",
        )
        chosen = ["--team-version", "{{ params.team_version }}", "--reason", "{{ params.reason }}"]
        approve >> team_job(run, "promote", arguments=["--run", name, *chosen], outlets=[team_asset(run)])
    return dag


for _run in find_runs()[0]:
    globals()[f"promote_team__{_run.config.run}"] = promote_team(_run)
