"""rollback_team: put an earlier champion back into service, by hand.

approve (a person, in Airflow's page) ──> rollback: troupe rollback ... ──> asset troupe://team/<run>
"""

from __future__ import annotations

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Asset, Param

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.timing import default_args


def rollback_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    settings, name = run.config.schedule, run.config.run
    assert settings is not None, "find_runs gives scheduled runs only"
    with DAG(
        dag_id=f"rollback_team__{name}",
        description=f"Put an earlier champion of {name} back into service",
        doc_md=f"Run config: `{run.path}`.\n\n{__doc__}",
        schedule=None,
        max_active_runs=1,
        tags=["troupe", name],
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
        default_args=default_args(settings),
    ) as dag:
        approve = ApprovalOperator(
            task_id="approve",
            subject=f"Roll {name} back to {{{{ params.to or 'the champion before' }}}}?",
            body="Reason: {{ params.reason }}",
        )
        rollback = RayJobOperator(
            task_id="rollback",
            command="rollback",
            run_config=run.json,
            folder=run.folder,
            arguments=[
                "--run",
                name,
                "--reason",
                "{{ params.reason }}",
                "{{ '--to=%d' % params.to if params.to else '' }}",
            ],
            outlets=[Asset(name=f"team/{name}", uri=f"troupe://team/{name}")],
        )
        approve >> rollback
    return dag


for _run in find_runs()[0]:
    globals()[f"rollback_team__{_run.config.run}"] = rollback_team(_run)
