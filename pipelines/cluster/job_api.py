"""job_api: Ray's jobs REST API at one address, by plain HTTP.

    JobApi(address).submit / job / jobs / log / stop / upload ──HTTP──> dashboard of the cluster

Plain HTTP and the standard library: no import of Ray, so that Airflow's processes stay light, and every request has a
deadline. A wrong address or token is a ValueError; no answer, which may pass, is ClusterUnreachable.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from pipelines.cluster.auth import auth_token, token_path
from pipelines.config.schedule import ClusterConfig, check_address
from stores.proxies import is_loopback

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
REQUEST_TIMEOUT_S = 30.0


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

    address: str
    timeout_s: float = REQUEST_TIMEOUT_S
    _opener: OpenerDirector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.address = check_address(self.address)
        self._opener = build_opener(*([ProxyHandler({})] if is_loopback(self.address) else []))

    @property
    def _host(self) -> str:
        return urlsplit(self.address).hostname or ""

    def job(self, submission_id: str) -> Job | None:
        """A job; None if the cluster does not know it (any more)."""
        code, body = self._send("GET", f"/api/jobs/{submission_id}")
        return None if code == 404 else _job(self._parsed(code, body))

    def jobs(self) -> list[Job]:
        """Every job that was submitted to the cluster, newest first."""
        rows = [row for row in self._json("GET", "/api/jobs/") if row.get("type") == "SUBMISSION"]
        return sorted(map(_job, rows), key=lambda job: job.started_at or 0.0, reverse=True)

    def log(self, submission_id: str) -> str:
        """All that a job has printed so far; empty where it has not begun, or its log is out of reach."""
        code, body = self._send("GET", f"/api/jobs/{submission_id}/logs")
        return str(self._parsed(code, body).get("logs") or "") if code == 200 else ""

    def submit(self, request: Mapping[str, Any]) -> bool:
        """Starts a job; False if its submission id exists already."""
        code, body = self._send("POST", "/api/jobs/", dict(request))
        if code != 200 and "already exists" in body:
            return False
        self._parsed(code, body)
        return True

    def stop(self, submission_id: str) -> bool:
        """Asks a job to end; False where the cluster does not know it. Harmless for one that has ended."""
        code, body = self._send("POST", f"/api/jobs/{submission_id}/stop")
        if code == 404:
            return False
        self._parsed(code, body)
        return True

    def upload(self, name: str, content: bytes) -> str:
        """Keeps a package on the cluster unless it is there; returns its URI."""
        if self._send("GET", f"/api/packages/gcs/{name}")[0] == 404:
            code, body = self._send("PUT", f"/api/packages/gcs/{name}", content)
            if code != 200:
                raise ClusterUnreachable(f"{self.address} did not take the working directory: HTTP {code}, {body}")
        return f"gcs://{name}"

    def _json(self, method: str, path: str) -> Any:
        return self._parsed(*self._send(method, path))

    def _parsed(self, code: int, body: str) -> Any:
        if code in (401, 403):
            raise ValueError(self._refusal(code))
        if code == 404:
            raise ValueError(
                f"{self.address} answers, but it is no Ray dashboard (HTTP 404): give http://HOST:8265 of the cluster"
            )
        if code != 200:
            raise ClusterUnreachable(f"{self.address} answered HTTP {code}: {last_lines(body, 5)}")
        try:
            return json.loads(body)
        except json.JSONDecodeError:
            raise ValueError(f"{self.address} answers, but not as Ray's job API: is it http://HOST:8265?") from None

    def _send(self, method: str, path: str, data: Any = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/octet-stream" if isinstance(data, bytes) else "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        content = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
        request = Request(self.address + path, data=content, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except http.client.BadStatusLine as error:
            if isinstance(error, http.client.RemoteDisconnected):  # it is just going down, or coming up
                raise ClusterUnreachable(f"{self.address} hung up without an answer") from None
            raise ValueError(
                f"{self.address} answers, but not in HTTP ({error!r}): is it the port of the cluster itself? "
                f"Jobs go to the dashboard, e.g. http://{self._host}:8265"
            ) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ClusterUnreachable(
                f"no Ray cluster answers at {self.address} ({reason}): is it up, and is that its dashboard's address "
                "(cluster.address, RAY_API_SERVER_ADDRESS)?"
            ) from None

    def _token(self) -> str:
        """Ray's token; on this machine also without RAY_AUTH_MODE."""
        is_sent = os.environ.get("RAY_AUTH_MODE", "") == "token" or is_loopback(self.address)
        return auth_token() if is_sent else ""

    def _refusal(self, code: int) -> str:
        if self._token():
            where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(token_path())
            return (
                f"{self.address} refuses the token of {where} (HTTP {code}): it has expired or belongs to another "
                "cluster; put the cluster's token there (on its head: `ray get-auth-token`)"
            )
        return (
            f"{self.address} wants a token (HTTP {code}): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file "
            f"{token_path()} (RAY_AUTH_TOKEN_PATH) to what `ray get-auth-token` says on the cluster's head"
        )


def address_of(cluster: ClusterConfig) -> str:
    """Where jobs are sent."""
    return cluster.address or check_address(os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS)


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
