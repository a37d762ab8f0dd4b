"""ray_job: a troupe command as an Airflow task. Submits it as a Ray job; a long one is waited for in the triggerer, without a slot.

    execute ──attach or ask──> job ──ends within 15 s───────────────────────────────────────────> resume ──> ref | skip | error
                               └────defer──> RayJobTrigger (log into the task's log) ──event──────────────┘

A deferral costs a second or more (two loops of the triggerer, a second task process), so a short job is waited for in the task.

What is submitted is named for (run, iteration, stage, model group, attempt): a restarted Airflow attaches to the job that
runs, and a cleared or killed task stops it. Bad input and out of memory fail at once, all else may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperator, conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from airflow.triggers.base import BaseTrigger, TriggerEvent

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
IN_TASK_S = 15.0
"""How long the task's own process waits for its job before it defers."""
POLL_S = (0.25, 5.0)
"""Seconds between two looks at a job: at first, and at most. In between it is a 60th of the time that was waited."""


class RayJobOperator(BaseOperator):
    """Runs one troupe command on the run's cluster and returns the small result that it hands back."""

    template_fields: Sequence[str] = ("arguments", "iteration", "model_group", "since", "job")

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
        in_task_s: float = IN_TASK_S,
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
        in_task_s: seconds that the task waits for its job before it defers.
        kwargs: Airflow's own; assets among `outlets` get the result as extra of their event.
        """
        super().__init__(**kwargs)
        self.run_config, self.command, self.folder = run_config, command, folder
        self.iteration, self.model_group, self.arguments = iteration, model_group, list(arguments)
        self.since, self.job, self.in_task_s = since, job, in_task_s
        self._attached: tuple[str, str] | None = None
        self._is_killed = False

    def execute(self, context: Context) -> Any:
        """Attaches to the job or starts it; waits for its result, from `in_task_s` on in the triggerer."""
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
        self._attached = (api.address, job)
        if self._is_killed:  # before there was a job that could be stopped
            self.on_kill()
        self.log.info("Ray job %s at %s/#/jobs/%s", job, api.shown, job)
        deadline = time.time() + self._timeout_s(config)
        follower = Follower(api, job, deadline=deadline, part=part)
        began = time.monotonic()
        while True:
            new, outcome = follower.poll()
            for line in new.splitlines():
                self.log.info("%s", line)
            if self._is_killed:  # Airflow's signal lets this go on; another job would have nobody who waits for it
                raise AirflowException(f"this task was killed while it waited for Ray job {job}, which is stopped")
            if outcome:
                return self.resume(context, {"outcome": outcome.to_dict(), "is_new": is_new})
            waited_s = time.monotonic() - began
            if waited_s >= self.in_task_s:
                trigger = RayJobTrigger(api.address, job, deadline, is_new, follower.num_seen, part)
                self.defer(trigger=trigger, method_name="resume")
            time.sleep(_poll_s(waited_s))

    def resume(self, context: Context, event: dict[str, Any]) -> Any:
        """Returns the result of a job that succeeded; raises with the end of its log for one that did not."""
        is_new = event["is_new"]
        outcome = Outcome(**event["outcome"])
        if outcome.status == "STOPPED" and not is_new:  # it was going down already, with the try that was cleared
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

    def on_kill(self) -> None:
        """Stops the job of a task that is killed before the triggerer has it."""
        self._is_killed = True
        if self._attached:
            address, job = self._attached
            JobApi(address).stop(job)

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


class RayJobTrigger(BaseTrigger):
    """Waits for a Ray job in the triggerer and copies its log into the task's."""

    def __init__(
        self, address: str, submission_id: str, deadline: float, is_new: bool, num_seen: int = 0, part: str = ""
    ) -> None:
        """Args:
        deadline: unix seconds after which the job is stopped.
        is_new: see `pipelines.cluster.jobs.Attached`; passed on with the event.
        num_seen: characters of the job's log that are in the task's log already.
        part: the result that is waited for, see Follower.
        """
        super().__init__()
        self.address, self.submission_id, self.deadline, self.is_new = address, submission_id, deadline, is_new
        self.num_seen, self.part = num_seen, part

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """What a triggerer makes it from again."""
        names = ("address", "submission_id", "deadline", "is_new", "num_seen", "part")
        return "dags.ray_job.RayJobTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields {"outcome", "is_new"}, in plain data, once."""
        api, deadline = JobApi(self.address), self.deadline
        follower = Follower(api, self.submission_id, deadline=deadline, num_seen=self.num_seen, part=self.part)
        began = time.monotonic()
        # Airflow may need a heartbeat to see that the deferred task's process has ended; an event that comes before
        # makes the scheduler take the task for failed ("finished with state success, but ... queued").
        settled = began + conf.getint("workers", "min_heartbeat_interval")
        while True:
            new, outcome = await asyncio.to_thread(follower.poll)
            for line in new.splitlines():
                self.log.info("%s", line)
            if outcome:
                await asyncio.sleep(max(0.0, settled - time.monotonic()))
                yield TriggerEvent({"outcome": outcome.to_dict(), "is_new": self.is_new})
                return
            await asyncio.sleep(_poll_s(time.monotonic() - began))

    async def on_kill(self) -> None:
        """Stops the job when a user clears the task or marks it; a restart of the triggerer does not."""
        await asyncio.to_thread(JobApi(self.address, timeout_s=10).stop, self.submission_id)


def _poll_s(waited_s: float) -> float:
    shortest, longest = POLL_S
    return min(longest, max(shortest, waited_s / 60))


def _links(api: JobApi, context: Context) -> dict[str, str]:
    """Environment of the job: pages that show what started it, see pipelines/cluster/owner_links.py, and Airflow's log settings."""
    dag_run = context["dag_run"]
    base = conf.get("api", "base_url", fallback="") or "http://localhost:8080"
    own = ("TROUPE_MLFLOW_URL", "TROUPE_RAY_DASHBOARD_URL", "TROUPE_LOG")
    return {
        "TROUPE_DAG_RUN_URL": f"{base.rstrip('/')}/dags/{quote(dag_run.dag_id)}/runs/{quote(dag_run.run_id)}",
        "TROUPE_RAY_DASHBOARD_URL": api.shown,
    } | {name: os.environ[name] for name in own if name in os.environ}
