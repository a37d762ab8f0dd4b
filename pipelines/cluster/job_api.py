"""job_api: Ray's jobs REST API at one address, by plain HTTP.

    JobApi(address).submit / job / jobs / log / stop / upload ──HTTP──> dashboard of the cluster

No import of Ray, so that Airflow's processes stay light. A wrong address or token is a ValueError; no answer, which may
pass, is ClusterUnreachable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from pipelines.cluster.auth import auth_mode, auth_token, token_path
from pipelines.config.schedule import ClusterConfig, check_address
from serve_apps.http.peer import Answer, Peer, PeerError
from stores.urls import is_loopback, without_secrets

T = TypeVar("T")
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
REQUEST_TIMEOUT_S = 30.0
LOG_TIMEOUT_S = 1800.0
"""For all of a log, which may be long, over a slow line; it may be silent for as long as any other answer."""
MAX_LOG_BYTES = 1 << 30
"""Bytes of an answer: it may be all that a job has printed."""


class ClusterUnreachable(ConnectionError):
    """No cluster answers at the address, which may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as the cluster reports it."""

    submission_id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    exit_code: int | None
    entrypoint: str
    run: str
    """The run that it works for; empty for a job that is not Troupe's."""
    config_sha256: str
    """Identity of the run config that it was submitted with; empty for a job that is not Troupe's."""
    started_at: float | None
    """Unix seconds."""
    ended_at: float | None

    @property
    def has_ended(self) -> bool:
        """True once its status is final."""
        return self.status in ENDED


@dataclass
class JobApi:
    """Ray's job API at one address. Raises ValueError for a wrong address or token, ClusterUnreachable without an answer."""

    address: str = field(repr=False)
    timeout_s: float = REQUEST_TIMEOUT_S
    shown: str = field(init=False)
    """The address for messages and links: that of RAY_API_SERVER_ADDRESS may hold a password, for a proxy before the dashboard."""
    _peer: Peer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.address = check_address(self.address)
        self.shown = without_secrets(self.address)
        try:
            self._peer = Peer(self.address, timeout_s=self.timeout_s, max_bytes=MAX_LOG_BYTES)
        except PeerError as error:
            raise ValueError(f"{self.shown} cannot be asked: {error}") from None

    def job(self, submission_id: str) -> Job | None:
        """A job; None if the cluster does not know it (any more)."""
        answer = self._ask("GET", _path(submission_id), accepts=(200, 404))
        return None if answer.status == 404 else self._read(answer, _job)

    def jobs(self) -> list[Job]:
        """Every job that was submitted to the cluster, newest first."""
        jobs = self._read(self._ask("GET", "/api/jobs/"), _submitted)
        return sorted(jobs, key=lambda job: job.started_at or 0.0, reverse=True)

    def log(self, submission_id: str) -> str:
        """All that a job has printed so far; empty where it has not begun, or its log is out of reach."""
        answer = self._ask("GET", f"{_path(submission_id)}/logs", accepts=range(600), answer_s=LOG_TIMEOUT_S)
        return self._read(answer, lambda said: str(said.get("logs") or "")) if answer.status == 200 else ""

    def submit(self, request: Mapping[str, Any]) -> bool:
        """Starts a job; False if its submission id exists already."""
        answer = self._ask("POST", "/api/jobs/", json=dict(request), accepts=(200, 400, 500))
        if answer.status == 200:
            self._read(answer, dict)
            return True
        if "already exists" in answer.text:
            return False
        error = ValueError if answer.status == 400 else ClusterUnreachable
        raise error(f"{self.shown} answered HTTP {answer.status}: {last_lines(answer.text, 5)}")

    def stop(self, submission_id: str) -> bool:
        """Asks a job to end; False where the cluster does not know it. Harmless for one that has ended."""
        answer = self._ask("POST", f"{_path(submission_id)}/stop", accepts=(200, 404))
        return answer.status == 200 and bool(self._read(answer, dict))

    def upload(self, name: str, content: bytes) -> str:
        """Keeps a package on the cluster unless it is there; returns its URI."""
        path, kind = f"/api/packages/gcs/{name}", {"Content-Type": "application/octet-stream"}
        if self._ask("GET", path, accepts=(200, 404)).status == 404:
            self._ask("PUT", path, content=content, headers=kind)
        return f"gcs://{name}"

    def _read(self, answer: Answer, read: Callable[[Any], T]) -> T:
        try:
            return read(answer.json())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{self.shown} answers, but not as Ray's job API: is it http://HOST:8265?") from None

    def _ask(
        self,
        method: str,
        path: str,
        *,
        accepts: Collection[int] = (200,),
        headers: Mapping[str, str] | None = None,
        **request: Any,
    ) -> Answer:
        own = {"Authorization": f"Bearer {token}"} if (token := self._token()) else {}
        try:
            return self._peer.ask(
                method, self.address + path, accepts=accepts, headers={**own, **(headers or {})}, **request
            )
        except PeerError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: PeerError) -> ValueError | ClusterUnreachable:
        if error.fault == "caller":
            return ValueError(self._refusal(error))
        if error.status == 404:
            return ValueError(
                f"{self.shown} answers, but it is no Ray dashboard (HTTP 404): give http://HOST:8265 of the cluster"
            )
        if error.fault == "address" and error.status is None:
            return ValueError(
                f"{self.shown} answers, but not in HTTP ({error}): is it the port of the cluster itself? "
                f"Jobs go to the dashboard, e.g. http://{urlsplit(self.address).hostname}:8265"
            )
        if error.fault in ("address", "request"):
            return ValueError(f"{self.shown} {error}: is it http://HOST:8265 of the cluster, of this version of Ray?")
        if error.status is not None:
            return ClusterUnreachable(f"{self.shown} answered HTTP {error.status}: {last_lines(error.text, 5)}")
        return ClusterUnreachable(
            f"no Ray cluster answers at {self.shown} ({error}): is it up, and is that its dashboard's address "
            "(cluster.address, RAY_API_SERVER_ADDRESS)?"
        )

    def _token(self) -> str:
        """Ray's token; on this machine also without RAY_AUTH_MODE."""
        is_sent = auth_mode() == "token" or is_loopback(self.address)
        return auth_token() if is_sent else ""

    def _refusal(self, error: PeerError) -> str:
        if error.status is None:
            return f"{self.shown}: {error}; the token of RAY_AUTH_TOKEN or {token_path()} has signs that no token has"
        code = error.status
        if self._token():
            where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(token_path())
            return (
                f"{self.shown} refuses the token of {where} (HTTP {code}): it has expired or belongs to another "
                "cluster; put the cluster's token there (on its head: `ray get-auth-token`)"
            )
        return (
            f"{self.shown} wants a token (HTTP {code}): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file "
            f"{token_path()} (RAY_AUTH_TOKEN_PATH) to what `ray get-auth-token` says on the cluster's head"
        )


def address_of(cluster: ClusterConfig) -> str:
    """Where jobs are sent."""
    return cluster.address or check_address(os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS)


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"


def _submitted(rows: Any) -> list[Job]:
    return [_job(row) for row in rows if row.get("type") == "SUBMISSION"]


def _job(row: Mapping[str, Any]) -> Job:
    started, ended, metadata = row.get("start_time"), row.get("end_time"), row.get("metadata") or {}
    return Job(
        submission_id=row["submission_id"],
        status=row["status"],
        message=row.get("message") or "",
        exit_code=row.get("driver_exit_code"),
        entrypoint=row.get("entrypoint") or "",
        run=metadata.get("troupe_run", ""),
        config_sha256=metadata.get("troupe_config", ""),
        started_at=started / 1000 if started else None,
        ended_at=ended / 1000 if ended else None,
    )


def last_lines(text: str, count: int) -> str:
    """The last `count` lines that are not empty."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])
