"""client: Ray's jobs REST API at one address. No import of Ray, so that Airflow's processes stay light."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
TIMEOUT_S = 30.0
LOG_TIMEOUT_S = 300.0
"""A log comes in one piece and may be long."""


class ClusterAway(ConnectionError):
    """No cluster answers at the address, which may pass."""


class RayJobs:
    """The jobs of one cluster. Raises ValueError for what a repetition cannot change, ClusterAway for what may pass."""

    def __init__(self, address: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Args:
        address: of the cluster's dashboard; by default RAY_API_SERVER_ADDRESS, or port 8265 of this machine.
        headers: of every request; by default the token, see `_token`.
        """
        self.address = (address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS).rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(
                f"address {self.address!r} is no URL of a Ray dashboard: write it as http://HOST:8265 (Ray's own ray:// is another port)"
            )
        token = _token(self.address)
        self.headers = dict(headers or ({"Authorization": f"Bearer {token}"} if token else {}))

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """A job as Ray reports it; None if the cluster does not know it (any more)."""
        answer = self._ask("GET", _path(submission_id), accepts=(200, 404))
        return None if answer.status_code == 404 else self._object(answer)

    def log(self, submission_id: str) -> str:
        """All that a job has printed so far."""
        answer = self._ask("GET", f"{_path(submission_id)}/logs", timeout=LOG_TIMEOUT_S)
        return str(self._object(answer).get("logs") or "")

    def submit(self, request: Mapping[str, Any]) -> bool:
        """Starts a job; False if its submission id exists already."""
        answer = self._ask("POST", "/api/jobs/", json=dict(request), accepts=(200, 400, 500))
        if answer.status_code != 200 and "already exists" not in answer.text:
            raise (ValueError if answer.status_code == 400 else ClusterAway)(self._said(answer))
        return answer.status_code == 200

    def stop(self, submission_id: str) -> None:
        """Asks a job to end; harmless for one that has, or that the cluster does not know."""
        self._ask("POST", f"{_path(submission_id)}/stop", accepts=(200, 404))

    def _ask(self, method: str, path: str, *, accepts: Collection[int] = (200,), **request: Any) -> httpx.Response:
        try:
            answer = httpx.request(
                method, self.address + path, headers=self.headers, **{"timeout": TIMEOUT_S, **request}
            )
        except httpx.HTTPError as error:
            raise ClusterAway(
                f"no Ray cluster answers at {self.address} ({error}): is it up, and is that its dashboard's address?"
            ) from None
        if answer.status_code in accepts:
            return answer
        if answer.status_code in (401, 403):
            raise ValueError(
                f"{self._said(answer)}: give its token, as RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or in `headers`"
            )
        raise (ClusterAway if answer.status_code >= 500 else ValueError)(self._said(answer))

    def _object(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            return dict(answer.json())
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{self.address} answers, but not as Ray's jobs API: is it http://HOST:8265?") from None

    def _said(self, answer: httpx.Response) -> str:
        return f"{self.address} answered HTTP {answer.status_code}: {answer.text.strip()[-500:]}"


def _token(address: str) -> str:
    """Returns RAY_AUTH_TOKEN, or what the file of RAY_AUTH_TOKEN_PATH holds; for a cluster of this machine also what Ray wrote for its user."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    own = Path.home() / ".ray" / "auth_token" if urlsplit(address).hostname in LOOPBACK else None
    file = Path(named) if named else own
    return file.read_text().strip() if file is not None and file.is_file() else ""


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"
