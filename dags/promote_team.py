"""promote_team: put a registered team version into service, by hand.

    approve (a person, in Airflow's page) ──> promote: troupe promote ... ──> asset troupe://team/<run>

The engines prove that they serve its weights before the champion moves.
"""

from __future__ import annotations

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Asset, Param

from dags.ray_job import RayJobOperator
from dags.run_configs import ScheduledRun, find_runs
from dags.timing import default_args


def promote_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    settings, name = run.config.schedule, run.config.run
    assert settings is not None, "find_runs gives scheduled runs only"
    with DAG(
        dag_id=f"promote_team__{name}",
        description=f"Put a team version of {name} into service",
        doc_md=f"Run config: `{run.path}`.\n\n{__doc__}",
        schedule=None,
        max_active_runs=1,
        tags=["troupe", name],
        params={
            "team_version": Param(type="integer", minimum=1, title="Team version", description="As MLflow numbers it"),
            "reason": Param(type="string", minLength=3, maxLength=500, title="Reason", description="For the history"),
        },
        default_args=default_args(settings),
    ) as dag:
        approve = ApprovalOperator(
            task_id="approve",
            subject=f"Put team version {{{{ params.team_version }}}} of {name} into service?",
            body="Reason: {{ params.reason }}",
        )
        promote = RayJobOperator(
            task_id="promote",
            command="promote",
            run_config=run.json,
            folder=run.folder,
            arguments=["--run", name, "--team-version", "{{ params.team_version }}", "--reason", "{{ params.reason }}"],
            outlets=[Asset(name=f"team/{name}", uri=f"troupe://team/{name}")],
        )
        approve >> promote
    return dag


for _run in find_runs()[0]:
    globals()[f"promote_team__{_run.config.run}"] = promote_team(_run)
