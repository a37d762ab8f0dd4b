"""operator: a command as a Ray job that an Airflow task starts, follows and ends.

A job is called as the task in its DAG run and the attempt, and a submission id is used once per cluster: a worker or scheduler that was
restarted attaches to the job that runs, and two never start it twice. A retry of a job that failed is the next attempt.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from .client import ClusterAway, RayJobs
from .following import FollowingOperator, JobTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

RESULT_MARK = "AIRFLOW_RESULT: "
"""Begins the line with which a job hands a JSON value to its task."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
AWAY_S = 120.0
"""How long a cluster may be out of reach before its job is given up."""
LAST_LINES = 20
"""Lines of the log in the error of a job that failed."""
DEFAULT_TIMEOUT_S = 24 * 3600.0


@dataclass
class RayJob:
    """A job of a cluster that is followed, see `following.Job`."""

    address: str
    submission_id: str
    deadline: float
    """Unix seconds after which it is stopped."""
    is_new: bool = True
    """False where it was there before: it may be of a try that is just being stopped."""
    num_seen: int = 0
    """Characters of its log that are in the task's log already."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    _away_since: float | None = field(default=None, init=False, repr=False)

    def fields(self) -> dict[str, Any]:
        """Returns the arguments that make it again."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def stop(self) -> None:
        """Asks it to end."""
        self._jobs.stop(self.submission_id)

    def poll(self) -> tuple[str, dict[str, Any] | None]:
        """Returns whole lines that are new, and {"status", "exit_code", "result", "error"} once it has ended."""
        try:
            polled = self._poll()
        except ClusterAway as error:
            self._away_since = self._away_since or time.monotonic()
            is_over = time.monotonic() - self._away_since >= AWAY_S
            return "", _ended("AWAY", f"{error}; waited {AWAY_S:g} s") if is_over else None
        self._away_since = None
        return polled

    @property
    def _jobs(self) -> RayJobs:
        return RayJobs(self.address, self.headers)

    def _poll(self) -> tuple[str, dict[str, Any] | None]:
        job = self._jobs.job(self.submission_id)
        if job is None:
            return "", _ended("LOST", f"{self.address} no longer knows this job: the cluster was restarted")
        has_ended = job["status"] in ENDED
        log = self._jobs.log(self.submission_id)
        end = len(log) if has_ended else log.rfind("\n") + 1
        new, self.num_seen = log[self.num_seen : end], max(end, self.num_seen)
        if has_ended:
            error = "" if job["status"] == "SUCCEEDED" else _last_lines(log) or job.get("message") or ""
            return new, _ended(job["status"], error, exit_code=job.get("driver_exit_code"), result=result_in(log))
        if time.time() > self.deadline:
            self.stop()
            return new, _ended("TIMEOUT", f"not done at its deadline (timeout_s), stopped: {_last_lines(log)}")
        return new, None


class RayJobTrigger(JobTrigger):
    """Waits for a Ray job."""

    job_class = RayJob


class RayJobOperator(FollowingOperator):
    """Runs a command as a Ray job; returns the JSON value of the last line `AIRFLOW_RESULT: ...` that it prints, None without one."""

    template_fields: Sequence[str] = ("entrypoint", "runtime_env", "metadata", "address", "headers")
    trigger_class = RayJobTrigger

    def __init__(
        self,
        *,
        entrypoint: str,
        address: str = "",
        headers: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        reserves: Mapping[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        skip_on_exit_code: int | None = 99,
        fail_on_exit_code: Sequence[int] = (2, 127),
        **kwargs: Any,
    ) -> None:
        """Args:
        entrypoint: the command line that runs on the cluster.
        address: of the cluster's dashboard; by default RAY_API_SERVER_ADDRESS, or port 8265 of this machine.
        headers: of requests to it, e.g. {"Authorization": "Bearer {{ conn.ray.password }}"}; by default the token of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
        runtime_env: Ray's, e.g. {"pip": [...], "env_vars": {...}, "working_dir": "s3://..."}.
        metadata: texts that Ray keeps with the job.
        reserves: what the entrypoint reserves, under Ray's names: entrypoint_num_cpus, entrypoint_num_gpus, entrypoint_memory (bytes), entrypoint_resources.
        timeout_s: seconds after which the job is stopped and the task fails.
        skip_on_exit_code: the exit code that skips the task, as BashOperator's.
        fail_on_exit_code: exit codes that no retry can change: bad input, no such command.
        kwargs: `in_task_s`, and Airflow's own.
        """
        super().__init__(**kwargs)
        self.entrypoint, self.address, self.headers = entrypoint, address, dict(headers or {})
        self.runtime_env, self.metadata = dict(runtime_env or {}), dict(metadata or {})
        self.reserves, self.timeout_s = dict(reserves or {}), timeout_s
        self.skip_on_exit_code, self.fail_on_exit_code = skip_on_exit_code, tuple(fail_on_exit_code)

    def begin_job(self, context: Context) -> RayJob:
        """Returns the attempt that is pending, running or done, else submits the next one."""
        try:
            jobs = RayJobs(self.address, self.headers)
            submission_id, is_new = self._attach(jobs, _name(context))
        except ValueError as error:
            raise AirflowFailException(str(error)) from None
        except ClusterAway as error:
            raise AirflowException(str(error)) from None
        self.log.info("Ray job %s at %s/#/jobs/%s", submission_id, jobs.address, submission_id)
        deadline = time.time() + self.timeout_s
        return RayJob(jobs.address, submission_id, deadline, is_new=is_new, headers=jobs.headers)

    def returned(self, context: Context, job: RayJob, ended: dict[str, Any]) -> Any:
        """Returns the result of a job that succeeded; AirflowFailException where a retry cannot help."""
        status, code = ended["status"], ended["exit_code"]
        if status == "SUCCEEDED":
            return ended["result"]
        if status == "STOPPED" and not job.is_new:  # it was going down already, with the try that was cleared
            return self.execute(context)
        message = f"Ray job {job.submission_id} {status}, exit code {code}: {ended['error']}"
        if code is not None and code == self.skip_on_exit_code:
            raise AirflowSkipException(message)
        is_final = status == "STOPPED" or code in self.fail_on_exit_code
        raise (AirflowFailException if is_final else AirflowException)(message)

    def _attach(self, jobs: RayJobs, name: str) -> tuple[str, bool]:
        attempt = 0
        while True:
            submission_id = f"{name}-a{attempt}"
            job = jobs.job(submission_id)
            if job is None:
                request = {"entrypoint": self.entrypoint, "submission_id": submission_id, **self.reserves}
                if jobs.submit(request | {"runtime_env": self.runtime_env, "metadata": self.metadata}):
                    return submission_id, True
                job = jobs.job(submission_id)  # somebody else was first
            if job is None or job["status"] not in ("FAILED", "STOPPED"):
                return submission_id, False
            attempt += 1


def result_in(log: str) -> Any:
    """Returns the last value that a log hands over; None where there is none."""
    line = next((line for line in reversed(log.splitlines()) if RESULT_MARK in line), "")
    with suppress(ValueError):
        return json.JSONDecoder().raw_decode(line.partition(RESULT_MARK)[2])[0]
    return None


def _name(context: Context) -> str:
    """Returns the submission id without its attempt: another one for a task that was cleared, since its work is wanted again."""
    task, dag_run = context["ti"], context["dag_run"]
    words = [dag_run.dag_id, dag_run.run_id, task.task_id]
    if task.map_index >= 0:
        words.append(str(task.map_index))
    if clears := dag_run.clear_number:
        words.append(f"c{clears}")
    name = "-".join(words)
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    return f"{plain}-{sha256('/'.join(words).encode()).hexdigest()[:6]}"


def _ended(status: str, error: str, *, exit_code: int | None = None, result: Any = None) -> dict[str, Any]:
    return {"status": status, "exit_code": exit_code, "result": result, "error": error}


def _last_lines(log: str) -> str:
    return "\n".join([line for line in log.splitlines() if line.strip()][-LAST_LINES:])
