"""ray_job: a troupe command as an Airflow task. Submits it as a Ray job; a long one is waited for in the triggerer, without a slot.

    execute ──attach or ask──> job ──followed as in `dags/ray_jobs`──> ref | skip | error

What is submitted is named for (run, iteration, stage, model group, attempt): a restarted Airflow attaches to the job that
runs, and a cleared or killed task stops it. Bad input and out of memory fail at once, all else may be repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.ray_jobs.following import FollowingOperator, JobTrigger
from pipelines.cluster.job_api import ClusterUnreachable, JobApi, address_of
from pipelines.cluster.jobs import (
    Follower,
    Outcome,
    Work,
    ask,
    attach,
    begin_work,
    iterate_work,
    result_in,
    stage_work,
)
from pipelines.config.run_config import RunConfig, parse_config
from pipelines.stages.table import STAGES

if TYPE_CHECKING:
    from airflow.sdk import Context

DEFAULT_TIMEOUT_S = 7200.0
DEADLINES_IN = {"begin": 2, "iterate": 2, "watch": 2}
"""Commands that do the work of two stages: warm start and `before`; test and sentinel tasks."""


@dataclass
class TroupeJob:
    """A job of a `troupe` command that is followed, see `ray_jobs.following.Job`."""

    address: str
    submission_id: str
    deadline: float
    """Unix seconds after which it is stopped."""
    is_new: bool
    """See `pipelines.cluster.jobs.Attached`."""
    num_seen: int = 0
    """Characters of its log that are in the task's log already."""
    part: str = ""
    """The result that is waited for, see Follower."""
    _follower: Follower = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._follower = Follower(
            JobApi(self.address), self.submission_id, deadline=self.deadline, num_seen=self.num_seen, part=self.part
        )

    def poll(self) -> tuple[str, dict[str, Any] | None]:
        """Returns log lines that are new, and the fields of `Outcome` once there is one."""
        new, outcome = self._follower.poll()
        return new, None if outcome is None else outcome.to_dict()

    def stop(self) -> None:
        """Asks it to end."""
        JobApi(self.address, timeout_s=10).stop(self.submission_id)

    def fields(self) -> dict[str, Any]:
        """Returns the arguments that make it again."""
        names = ("address", "submission_id", "deadline", "is_new", "part")
        return {name: getattr(self, name) for name in names} | {"num_seen": self._follower.num_seen}


class TroupeJobTrigger(JobTrigger):
    """Waits for the job of a `troupe` command."""

    job_class = TroupeJob


class RayJobOperator(FollowingOperator):
    """Runs one troupe command on the run's cluster and returns the small result that it hands back."""

    template_fields: Sequence[str] = ("arguments", "iteration", "model_group", "since", "job")
    trigger_class = TroupeJobTrigger

    def __init__(
        self,
        *,
        run_config: str,
        command: str,
        folder: str = "",
        iteration: Any = None,
        model_group: Any = "",
        since: Any = 0.0,
        arguments: Sequence[str] = (),
        job: Any = "",
        **kwargs: Any,
    ) -> None:
        """Args:
        run_config: the run config by value, JSON.
        command: `begin`, `stage collect`, `record`, ...
        folder: where the job starts on the cluster.
        iteration: the iteration that the work belongs to; without one it is work of this DAG run alone.
        since: when the run was begun, unix seconds, as `begin` returns it.
        arguments: what follows the command, for all but `begin` and `stage`; empty ones are left out.
        job: the job of the whole iteration (`iterate`), which this task asks for its work while it runs, or which has done it.
        kwargs: `in_task_s` and Airflow's own; assets among `outlets` get the result as extra of their event.
        """
        super().__init__(**kwargs)
        self.run_config, self.command, self.folder = run_config, command, folder
        self.iteration, self.model_group, self.arguments = iteration, model_group, list(arguments)
        self.since, self.job = since, job

    def begin_job(self, context: Context) -> TroupeJob:
        """Attaches to the job of this task, or starts it."""
        config = parse_config(json.loads(self.run_config), "the DAG's run config")
        part = self._part
        try:
            api = JobApi(address_of(config.cluster))
            if self._is_followed(api):
                # Where somebody stops it, or clears a task beside this one, this one goes on in a job of its own.
                job, is_new = str(self.job), False
                ask(api, job, part)
            else:
                part = part if self.command == "iterate" else ""
                work, links = self._work(config.run, context), _links(api, context)
                since = float(self.since)
                job, is_new = attach(api, config, work, folder=self.folder, links=links, since=since, part=part)
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        except ClusterUnreachable as error:
            raise AirflowException(str(error)) from None
        self.log.info("Ray job %s at %s/#/jobs/%s", job, api.shown, job)
        return TroupeJob(api.address, job, time.time() + self._timeout_s(config), is_new, part=part)

    def returned(self, context: Context, job: TroupeJob, ended: dict[str, Any]) -> Any:
        """Returns the result of a job that succeeded; raises with the end of its log for one that did not."""
        outcome = Outcome(**ended)
        if outcome.status == "STOPPED" and not job.is_new:  # it was going down already, with the try that was cleared
            return self.execute(context)
        if outcome.status != "SUCCEEDED" or outcome.ref is None:
            for line in outcome.error.splitlines():
                self.log.error("%s", line)
            message = f"Ray job {outcome.submission_id} {outcome.status}: {outcome.error}"
            raise (AirflowException if outcome.may_repeat else AirflowFailException)(message)
        if "skip" in outcome.ref:
            context["ti"].xcom_push("skip", outcome.ref["skip"])
            raise AirflowSkipException(outcome.ref["skip"])
        for asset in self.outlets:
            context["outlet_events"][asset].extra = outcome.ref
        return outcome.ref | ({"job": outcome.submission_id} if self.command == "iterate" else {})

    @property
    def _part(self) -> str:
        """The result of the iteration's job that belongs to this task."""
        if self.command == "iterate":
            return "begin"
        stage = self.command.removeprefix("stage ")
        return f"{stage}/{self.model_group}" if self.model_group else stage

    def _is_followed(self, api: JobApi) -> bool:
        """Whether the iteration's job does this task's work: it runs, or has done it."""
        job = api.job(str(self.job)) if self.job else None
        return job is not None and (not job.has_ended or result_in(api.log(str(self.job)), self._part) is not None)

    def _timeout_s(self, config: RunConfig) -> float:
        timeout_s = config.schedule.stage_timeout_s if config.schedule else DEFAULT_TIMEOUT_S
        command, *more = self.command.split()
        if command == "stage":
            return STAGES[more[0]].job_timeout_s(config, timeout_s)
        canary_s = config.canary_timeout_s if command == "canary" else 0.0
        return timeout_s * DEADLINES_IN.get(command, 1) + canary_s

    def _work(self, run: str, context: Context) -> Work:
        claim = f"{context['dag_run'].dag_id}/{context['dag_run'].run_id}"
        command, *more = self.command.split()
        if command == "begin":
            return begin_work(run, claim, is_forced=bool(context["params"].get("force")))
        if command == "iterate":
            return iterate_work(run, claim, is_forced=bool(context["params"].get("force")))
        if command == "stage":
            return stage_work(run, more[0], int(self.iteration), str(self.model_group or ""))
        arguments = tuple(str(argument) for argument in self.arguments if argument != "")
        # A retry attaches to the same job; whoever clears a task wants its work done again.
        if clears := context["dag_run"].clear_number:
            claim += f"/{clears}"
        scope = f"it{self.iteration}" if self.iteration is not None else sha256(claim.encode()).hexdigest()[:8]
        return Work(run=run, command=command, arguments=arguments, label=f"{scope}-{command}")


def _links(api: JobApi, context: Context) -> dict[str, str]:
    """Environment of the job: pages that show what started it, see pipelines/cluster/owner_links.py, and Airflow's log settings."""
    dag_run = context["dag_run"]
    base = conf.get("api", "base_url", fallback="") or "http://localhost:8080"
    own = ("TROUPE_MLFLOW_URL", "TROUPE_RAY_DASHBOARD_URL", "TROUPE_LOG")
    return {
        "TROUPE_DAG_RUN_URL": f"{base.rstrip('/')}/dags/{quote(dag_run.dag_id)}/runs/{quote(dag_run.run_id)}",
        "TROUPE_RAY_DASHBOARD_URL": api.shown,
    } | {name: os.environ[name] for name in own if name in os.environ}
