"""following: an operator that waits for a job: in the task while it is short, then in the triggerer, without a slot.

    execute ──begin_job──> job ──ends within `in_task_s`────────────────────────────> resume ──> `returned`
                            └────defer──> JobTrigger (log into the task's log) ──event──┘

A deferral costs a second or more (two loops of the triggerer, a second task process), so a short job is waited for in the task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from airflow.sdk import BaseOperator, conf
from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from airflow.sdk import Context

IN_TASK_S = 15.0
"""How long the task's own process waits for its job before it defers."""
POLL_S = (0.25, 5.0)
"""Seconds between two looks at a job: at first, and at most. In between it is a 60th of the time that was waited."""


class Job(Protocol):
    """A job that is followed. It is made from `fields` again, in the triggerer and in the task that goes on after it."""

    submission_id: str

    def poll(self) -> tuple[str, dict[str, Any] | None]:
        """Returns log lines that are new, and how the job ended, as plain data, once it has."""

    def stop(self) -> None:
        """Asks the job to end; harmless for one that has."""

    def fields(self) -> dict[str, Any]:
        """Returns the arguments that make it again, plain data."""


class JobTrigger(BaseTrigger):
    """Waits for a job in the triggerer and copies its log into the task's."""

    job_class: ClassVar[Any]
    """The class of its jobs."""

    def __init__(self, **fields: Any) -> None:
        """Args: fields: see `Job.fields`."""
        super().__init__()
        self.job: Job = self.job_class(**fields)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """What a triggerer makes it from again."""
        return f"{type(self).__module__}.{type(self).__qualname__}", self.job.fields()

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields {"ended", "fields"}, in plain data, once."""
        began = time.monotonic()
        # Airflow may need a heartbeat to see that the deferred task's process has ended; an event that comes before
        # makes the scheduler take the task for failed ("finished with state success, but ... queued").
        settled = began + conf.getint("workers", "min_heartbeat_interval")
        while True:
            new, ended = await asyncio.to_thread(self.job.poll)
            for line in new.splitlines():
                self.log.info("%s", line)
            if ended is not None:
                await asyncio.sleep(max(0.0, settled - time.monotonic()))
                yield TriggerEvent({"ended": ended, "fields": self.job.fields()})
                return
            await asyncio.sleep(_poll_s(time.monotonic() - began))

    async def on_kill(self) -> None:
        """Stops the job when a user clears the task or marks it; a restart of the triggerer does not."""
        await asyncio.to_thread(self.job.stop)


class FollowingOperator(BaseOperator):
    """Begins a job and waits for it."""

    trigger_class: ClassVar[type[JobTrigger]]

    def __init__(self, *, in_task_s: float = IN_TASK_S, **kwargs: Any) -> None:
        """Args:
        in_task_s: seconds that the task waits for its job before it defers.
        kwargs: Airflow's own.
        """
        super().__init__(**kwargs)
        self.in_task_s = in_task_s
        self._job: Job | None = None
        self._is_killed = False

    def begin_job(self, context: Context) -> Job:
        """Returns the job of this task: one that runs or is done, else a new one."""
        raise NotImplementedError

    def returned(self, context: Context, job: Any, ended: dict[str, Any]) -> Any:
        """Returns what the task returns for a job that has ended so; raises for one that failed."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Begins the job and waits for its result, from `in_task_s` on in the triggerer."""
        self._job = job = self.begin_job(context)
        if self._is_killed:  # before there was a job that could be stopped
            self.on_kill()
        began = time.monotonic()
        while True:
            new, ended = job.poll()
            for line in new.splitlines():
                self.log.info("%s", line)
            if self._is_killed:  # Airflow's signal lets this go on; another job would have nobody who waits for it
                raise AirflowException(
                    f"this task was killed while it waited for Ray job {job.submission_id}, which is stopped"
                )
            if ended is not None:
                return self.returned(context, job, ended)
            waited_s = time.monotonic() - began
            if waited_s >= self.in_task_s:
                self.defer(trigger=self.trigger_class(**job.fields()), method_name="resume")
            time.sleep(_poll_s(waited_s))

    def resume(self, context: Context, event: dict[str, Any]) -> Any:
        """Goes on when the triggerer has seen the job end."""
        return self.returned(context, self.trigger_class.job_class(**event["fields"]), event["ended"])

    def on_kill(self) -> None:
        """Stops the job of a task that is killed before the triggerer has it."""
        self._is_killed = True
        if self._job is not None:
            self._job.stop()


def _poll_s(waited_s: float) -> float:
    shortest, longest = POLL_S
    return min(longest, max(shortest, waited_s / 60))
