"""team_dags: DAGs beside train_team, each one task that runs a troupe command, what comes before it and what its result leads to.

evaluate_team     watch: troupe watch ──> state ──> sound | alarm | learning; like the last one    (`schedule.evaluate`)
roll_out_team     canary: troupe canary TEAM@VERSION --auto ──> verdict ──> promoted (asset) | sent_back | undecided
promote_team      approve (a person, in Airflow's page) ──> promote: troupe promote ──> asset troupe://team/<run>
rollback_team     approve ──> rollback: troupe rollback ──> the same asset
maintain_stores   maintain: troupe maintain, where that extension is there                        (`schedule.maintain`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task
from airflow.sdk.exceptions import AirflowFailException

from dags.run_configs import ScheduledRun, find_runs
from dags.team_dag import team_asset, team_dag, team_job
from stores.extensions import extensions

REASON = Param(type="string", minLength=3, maxLength=500, title="Reason", description="For the history")


def evaluate_team(run: ScheduledRun) -> DAG:
    """Checks the champion on the test and sentinel tasks, on a schedule of its own.

    It waits while a stage of `train_team` uses the engines. Its accuracy is compared with `schedule.target_accuracy`. A figure
    outside the range that is usual for the champion (section `watch`) fails the DAG run with the reason; `learning` means that
    some figures have too little history to be judged yet.
    """
    name = run.config.run
    with team_dag(
        run,
        "evaluate_team",
        what=f"The champion of {name} on test and sentinel tasks",
        doc=str(evaluate_team.__doc__),
        cron=run.settings.evaluate,
        params={"team": _team("champion", "candidate")},
    ) as dag:
        watch = team_job(run, "watch", arguments=["--run", name, "--team", "{{ params.team }}"])
        ends = [EmptyOperator(task_id="sound"), EmptyOperator(task_id="learning")]
        _by_result(watch, "state", ends=ends, fails="alarm")
    return dag


def roll_out_team(run: ScheduledRun) -> DAG:
    """Raises a registered team version's share of the gateway's requests step by step, then promotes it or sends it back.

    `pipelines/release/traffic.py` decides by the gateway's figures and the run config's section `traffic`. A team that was sent back
    fails the DAG run with the reason; if too little is known the canary keeps its share.
    """
    name = run.config.run
    with team_dag(
        run,
        "roll_out_team",
        what=f"Raise a team version of {name} step by step to all requests, or send it back",
        doc=str(roll_out_team.__doc__),
        params={"team": _team("candidate")},
    ) as dag:
        canary = team_job(run, "canary", arguments=[f"{name}@{{{{ params.team }}}}", "--auto"])
        promoted = EmptyOperator(task_id="promoted", outlets=[team_asset(run)])
        ends = [promoted, EmptyOperator(task_id="undecided")]
        _by_result(canary, "verdict", ends=ends, fails="sent_back", why=" was sent back")
    return dag


def promote_team(run: ScheduledRun) -> DAG:
    """Makes a registered team version the champion, by hand. The engines prove that they serve its weights before the champion moves."""
    name = run.config.run
    version = Param(type="integer", minimum=1, title="Team version", description="As MLflow numbers it")
    with team_dag(
        run,
        "promote_team",
        what=f"Make a team version of {name} the champion",
        doc=str(promote_team.__doc__),
        params={"team_version": version, "reason": REASON},
    ) as dag:
        approve = ApprovalOperator(
            task_id="approve",
            subject=f"Make team version {{{{ params.team_version }}}} of {name} the champion?",
            body="Reason: {{ params.reason }}",
        )
        chosen = ["--team-version", "{{ params.team_version }}", "--reason", "{{ params.reason }}"]
        approve >> team_job(run, "promote", arguments=["--run", name, *chosen], outlets=[team_asset(run)])
    return dag


def rollback_team(run: ScheduledRun) -> DAG:
    """Makes an earlier champion the champion again, by hand."""
    name = run.config.run
    to = Param(
        None,
        type=["null", "integer"],
        minimum=1,
        title="Team version",
        description="An earlier champion; empty: the one before the present one",
    )
    with team_dag(
        run,
        "rollback_team",
        what=f"Make an earlier champion of {name} the champion again",
        doc=str(rollback_team.__doc__),
        params={"to": to, "reason": REASON},
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


def maintain_stores(run: ScheduledRun) -> DAG:
    """Merges small files and removes old versions and orphaned weights, on a schedule."""
    name = run.config.run
    dry_run = Param(False, type="boolean", title="Dry run", description="Say what would go, change nothing")
    with team_dag(
        run,
        "maintain_stores",
        what=f"Compaction, retention and orphans of {name}",
        doc=str(maintain_stores.__doc__),
        cron=run.settings.maintain,
        params={"dry_run": dry_run},
    ) as dag:
        team_job(run, "maintain", arguments=["--run", name, "{{ '--dry-run' if params.dry_run else '' }}"])
    return dag


def _team(*aliases: str) -> Param:
    """A team by one of these aliases, of which the first is the default, or by its version."""
    pattern = f"^({'|'.join(aliases)}|[1-9][0-9]*)$"
    described = f"{', '.join(aliases)}, or a team version"
    return Param(aliases[0], type="string", pattern=pattern, title="Team", description=described)


def _by_result(job: Any, key: str, *, ends: Sequence[EmptyOperator], fails: str, why: str = "") -> None:
    """Goes on to the task that a value of a job's result names; the one called `fails` fails the DAG run with the reason."""

    @task.branch(task_id=key)
    def chosen(result: Any) -> str:
        return str(result[key])

    @task(task_id=fails, retries=0)
    def fail(result: Any) -> None:
        raise AirflowFailException(f"team version {result['team_version']}{why}: {result['reason']}")

    chosen(job.output) >> [*ends, fail(job.output)]


_makers = [roll_out_team, promote_team, rollback_team]
_there = {extension.name for extension in extensions()}
_makers += [make for name, make in (("watch", evaluate_team), ("maintain", maintain_stores)) if name in _there]
for _run in find_runs()[0]:
    for _make in _makers:
        globals()[f"{_make.__name__}__{_run.config.run}"] = _make(_run)
