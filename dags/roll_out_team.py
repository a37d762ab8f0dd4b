"""roll_out_team: raise a registered team version's share of the gateway's requests step by step, then promote it or send it back.

    canary: troupe canary TEAM@VERSION --auto ──> verdict ──> promoted (asset troupe://team/<run>) | sent_back | undecided

`pipelines/release/traffic.py` decides by the gateway's figures and the run config's section `traffic`. A team that was sent back
fails the DAG run with the reason; if too little is known the canary keeps its share.
"""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param, task
from airflow.sdk.exceptions import AirflowFailException

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_asset, team_dag, team_job


def roll_out_team(run: ScheduledRun) -> DAG:
    """The DAG of one run config."""
    name = run.config.run
    with team_dag(
        run,
        "roll_out_team",
        what=f"Raise a team version of {name} step by step to all requests, or send it back",
        doc=str(__doc__),
        params={
            "team": Param(
                "candidate",
                type="string",
                pattern="^(candidate|[1-9][0-9]*)$",
                title="Team",
                description="candidate, or a team version",
            )
        },
    ) as dag:

        @task.branch(task_id="verdict")
        def verdict(decision: Any) -> str:
            return str(decision["verdict"])

        @task(task_id="sent_back", retries=0)
        def sent_back(decision: Any) -> None:
            raise AirflowFailException(f"team version {decision['team_version']} was sent back: {decision['reason']}")

        canary = team_job(run, "canary", arguments=[f"{name}@{{{{ params.team }}}}", "--auto"])
        verdict(canary.output) >> [
            EmptyOperator(task_id="promoted", outlets=[team_asset(run)]),
            sent_back(canary.output),
            EmptyOperator(task_id="undecided"),
        ]
    return dag


for _run in find_runs()[0]:
    globals()[f"roll_out_team__{_run.config.run}"] = roll_out_team(_run)
