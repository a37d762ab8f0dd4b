"""jobs: the commands around Ray jobs: `begin` (with which a schedule starts an iteration), `submit`, `jobs`, `stop`."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.options import (
    JOBS,
    Address,
    Changes,
    ConfigPath,
    NotStarted,
    Root,
    RunName,
    config_of_job,
    existing_run,
    find_run,
    load,
    reports_errors,
)
from pipelines.cluster.faults import EXIT_CODES, FaultKind

if TYPE_CHECKING:
    from pipelines.cluster.job_api import JobApi
    from pipelines.cluster.jobs import Outcome, Work
    from pipelines.config.run_config import RunConfig
    from pipelines.run.run import Run

Cluster = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="URL", help="The URL of Ray's job API, http://HOST:8265. Default: as in a run config."
    ),
]

WIDE = 1000
"""Characters of a line that no terminal shows."""


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    for command in (begin, iterate, submit, jobs, stop):
        app.command(rich_help_panel=JOBS)(command)


def hand_back(ref: dict[str, Any], part: str = "") -> None:
    """Prints a small result as one line of JSON; in a job behind the mark by which its follower finds it.

    Args: part: which result it is, of a command that hands back several.
    """
    from pipelines.cluster.jobs import RUN_CONFIG_VARIABLE, ref_prefix

    mark = ref_prefix(part) if os.environ.get(RUN_CONFIG_VARIABLE) else ""
    print(f"{mark}{json.dumps(ref)}", flush=True)


def scheduled_run(config: str, root: str, *, is_read_only: bool = False) -> Run | None:
    """A run that has been started; None, and the reason is handed back, where a schedule asks before its first iteration."""
    try:
        return existing_run(config, root, is_read_only=is_read_only)
    except NotStarted as reason:
        if config_of_job(config) is None:
            raise
        hand_back({"skip": str(reason)})
        return None


@reports_errors
def begin(
    config: RunName,
    claim: Annotated[
        str, typer.Option(help="Identifies the caller, e.g. a DAG run; the same claim always gets the same iteration.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Trains even where the schedule would skip.")] = False,
    root: Root = "runs",
    changes: Changes = None,
    address: Address = "",
) -> None:
    """Begin an iteration for a schedule: make version 0 and the first team if there are none, and give the claim its iteration."""
    from pipelines.report.progress import Screen
    from pipelines.runners.schedule import begin_iteration

    run = find_run(config, root, changes)
    hand_back(begin_iteration(run, claim, is_forced=force, address=address, screen=Screen()))


@reports_errors
def iterate(
    config: RunName,
    claim: Annotated[str, typer.Option(help="As for `begin`.")],
    force: Annotated[bool, typer.Option("--force", help="Trains even where the schedule would skip.")] = False,
    root: Root = "runs",
    changes: Changes = None,
    address: Address = "",
) -> None:
    """Begin an iteration for a schedule, and do its stages and record it; each hands back its result.

    As a Ray job it does a stage when it is asked to, and ends where for two minutes nobody asks."""
    from functools import partial

    from pipelines.cluster.connect import connect
    from pipelines.cluster.jobs import is_asked
    from pipelines.cluster.owner_links import submission_id
    from pipelines.report.progress import Screen
    from pipelines.runners.schedule import Asks, begin_iteration
    from pipelines.runners.schedule import iterate as do_stages

    run, screen = find_run(config, root, changes), Screen()
    begun = begin_iteration(run, claim, is_forced=force, address=address, screen=screen)
    hand_back(begun, "begin")
    if "skip" in begun:
        return
    connect(address)
    asks = Asks(partial(is_asked, job)) if (job := submission_id()) else Asks()
    for part, ref in do_stages(run, int(begun["iteration"]), address=address, screen=screen, asks=asks):
        hand_back(ref, part)


@reports_errors
def submit(
    config: ConfigPath,
    stage: Annotated[
        str, typer.Option(help="Runs this stage only. Default: every iteration that is not done yet.")
    ] = "",
    iteration: Annotated[
        int | None, typer.Option("--iteration", min=1, help="The iteration of the stage; with --stage only.")
    ] = None,
    model_group: Annotated[str, typer.Option("--model-group", help="The model group; with --stage train only.")] = "",
    detach: Annotated[
        bool, typer.Option("--detach", help="Does not follow the job. (Ctrl-C stops a job that is followed.)")
    ] = False,
    changes: Changes = None,
    cluster: Cluster = "",
) -> None:
    """Submit a run, or one stage of it, to a Ray cluster as a job and follow it. If the job is running already, follow that one."""
    from pipelines.cluster.job_api import JobApi, address_of
    from pipelines.cluster.jobs import attach

    loaded = load(config, [*(changes or []), *([f"cluster.address={cluster}"] if cluster else [])])
    work = _work(loaded, stage, iteration, model_group)
    api = JobApi(address_of(loaded.cluster))
    links = {"TROUPE_RAY_DASHBOARD_URL": os.environ.get("TROUPE_RAY_DASHBOARD_URL", api.shown)}
    name, is_new = attach(api, loaded, work, folder=os.getcwd(), links=links, takes_done=False)
    print(f"job {name} at {api.shown}{'' if is_new else ', which was there already'}", file=sys.stderr)
    if detach:
        print(f"follow it: troupe submit {config} ...; stop it: troupe stop {name}", file=sys.stderr)
        return
    _finish(_followed(api, name, time.time() + _limit_s(loaded, stage)))


@reports_errors
def jobs(
    cluster: Cluster = "",
    run: Annotated[str, typer.Option("--run", help="Lists the jobs of this run only.")] = "",
) -> None:
    """List the jobs that were submitted to a cluster, newest first."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    whole = (Column(name, no_wrap=True) for name in ("status", "started", "seconds"))
    table = Table(Column("job", overflow="fold"), *whole)
    for job in _api(cluster).jobs():
        if job.run == run if run else job.submission_id.startswith("troupe-"):
            started = datetime.fromtimestamp(job.started_at).strftime("%F %T") if job.started_at else ""
            seconds = f"{(job.ended_at or time.time()) - job.started_at:.0f}" if job.started_at else ""
            code = f" ({job.exit_code})" if job.exit_code else ""
            table.add_row(*map(Text, (job.submission_id, f"{job.status}{code}", started, seconds)))
    # A program that reads it wants a line of each job.
    Console(width=None if Console().is_terminal else WIDE).print(table)


@reports_errors
def stop(
    job: Annotated[str, typer.Argument(help="The submission id of the job, as `troupe jobs` shows it.")],
    cluster: Cluster = "",
) -> None:
    """Stop a job. What it has finished is kept; submitting the same again continues it."""
    api = _api(cluster)
    if not api.stop(job):
        known = ", ".join(j.submission_id for j in api.jobs() if not j.has_ended) or "none"
        raise ValueError(f"{api.shown} has no job {job!r}; running are: {known}")
    print(f"job {job} is being stopped")


def _api(cluster: str) -> JobApi:
    from pipelines.cluster.job_api import JobApi, address_of
    from pipelines.config.schedule import ClusterConfig

    return JobApi(address_of(ClusterConfig(address=cluster)))


def _work(config: RunConfig, stage: str, iteration: int | None, model_group: str) -> Work:
    from pipelines.cluster.jobs import loop_work, stage_work
    from pipelines.stages.table import stage_named

    if not stage:
        if iteration or model_group:
            raise ValueError("--iteration and --model-group need --stage: without it every iteration is run")
        return loop_work(config)
    stage_named(stage).check_model_group(config, model_group)
    if iteration is None:
        raise ValueError(f"--stage {stage} needs --iteration: give the number of the iteration")
    return stage_work(config.run, stage, iteration, model_group)


def _limit_s(config: RunConfig, stage: str) -> float:
    """The seconds within which a job must end: those of the schedule for a stage, none where there is no schedule."""
    from pipelines.stages.table import STAGES

    if not stage or config.schedule is None:
        return float("inf")
    return STAGES[stage].job_timeout_s(config, config.schedule.stage_timeout_s)


def _followed(api: JobApi, name: str, deadline: float) -> Outcome:
    """The outcome of a job whose log goes to this terminal; Ctrl-C stops the job."""
    from pipelines.cluster.jobs import Follower, follow

    try:
        return follow(Follower(api, name, deadline=deadline), lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        api.stop(name)
        raise


def _finish(outcome: Outcome) -> None:
    """Ends this command as the job ended: its exit code, its last error lines."""
    if outcome.status == "SUCCEEDED":
        return
    print(f"troupe: job {outcome.submission_id} {outcome.status}: {outcome.error}", file=sys.stderr)
    kind = {
        "LOST": FaultKind.LOST,
        "UNREACHABLE": FaultKind.LOST,
        "REFUSED": FaultKind.BAD_INPUT,
        "STOPPED": FaultKind.INTERRUPTED,
    }.get(outcome.status, FaultKind.FAILED)
    raise SystemExit(outcome.exit_code if outcome.exit_code and outcome.exit_code > 0 else EXIT_CODES[kind])
