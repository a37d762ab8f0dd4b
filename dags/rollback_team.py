"""rollback_team: make an earlier champion the champion again, by hand.

approve (a person, in Airflow's page) ──> rollback: troupe rollback ... ──> asset troupe://team/<run>
"""

from __future__ import annotations

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_asset, team_dag, team_job


def rollback_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    name = run.config.run
    with team_dag(
        run,
        "rollback_team",
        what=f"Make an earlier champion of {name} the champion again",
        doc=str(__doc__),
        params={
            "to": Param(
                None,
                type=["null", "integer"],
                minimum=1,
                title="Team version",
                description="An earlier champion; empty: the one before the present one",
            ),
            "reason": Param(type="string", minLength=3, maxLength=500, title="Reason", description="For the history"),
        },
    ) as dag:
        approve = ApprovalOperator(
            task_id="approve",
            subject=f"Roll {name} back to {{{{ params.to or 'the champion before' }}}}?",
            body="Reason: {{ params.reason }}",
        )
        chosen = ["--reason", "{{ params.reason }}", "{{ '--to=%d' % params.to if params.to else '' }}"]
        # Not repeated by itself: without `to`, a second rollback would go one champion further back.
        approve >> team_job(run, "rollback", arguments=["--run", name, *chosen], outlets=[team_asset(run)], retries=0)
    return dag


for _run in find_runs()[0]:
    globals()[f"rollback_team__{_run.config.run}"] = rollback_team(_run)
