"""A small stand-in for Ray's dashboard: its jobs API over real HTTP, with the faults that a cluster shows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JobServer(ThreadingHTTPServer):
    """Jobs in a dict; nothing runs unless a test says so."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        """What was submitted, by submission id."""
        self.logs: dict[str, str] = {}
        self.read_logs: dict[str, str] = {}
        """The log as it was last handed out, by submission id."""
        self.packages: dict[str, bytes] = {}
        self.stopped: list[str] = []
        self.token = ""
        self.authorization = ""
        """What the last request said of who asks."""
        self.loses_race_to: dict[str, Any] | None = None
        """A job that somebody else submits just before the next submission."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, submission_id: str, status: str, log: str = "", **more: Any) -> None:
        self.jobs[submission_id] = {
            "type": "SUBMISSION",
            "submission_id": submission_id,
            "status": status,
            "message": "",
            "entrypoint": "troupe stage score",
            **more,
        }
        self.logs[submission_id] = log


class _Handler(BaseHTTPRequestHandler):
    server: JobServer

    def do_GET(self) -> None:
        _, kind, *rest = self.path.strip("/").split("/")
        if not self._may():
            return
        if kind == "version":
            self._say(200, {"ray_version": "2.60.0"})
        elif kind == "packages":
            self._say(200 if rest[-1] in self.server.packages else 404, "")
        elif not rest or not rest[0]:
            self._say(200, list(self.server.jobs.values()))
        elif rest[0] not in self.server.jobs:
            self._say(404, f"Job {rest[0]} does not exist")
        elif rest[1:] == ["logs"]:
            log = self.server.logs[rest[0]]
            self._say(200, {"logs": log})
            self.server.read_logs[rest[0]] = log
        else:
            self._say(200, self.server.jobs[rest[0]])

    def do_PUT(self) -> None:
        if self._may():
            self.server.packages[self.path.rsplit("/", 1)[1]] = self._body()
            self._say(200, "")

    def do_POST(self) -> None:
        body = self._body()
        if not self._may():
            return
        if self.path.endswith("/stop"):
            job = self.path.strip("/").split("/")[2]
            self.server.stopped.append(job)
            self._say(200 if job in self.server.jobs else 404, {"stopped": True})
            return
        request = json.loads(body)
        if self.server.loses_race_to:
            other, self.server.loses_race_to = self.server.loses_race_to, None
            self.server.put(request["submission_id"], **other)
        if request["submission_id"] in self.server.jobs:
            self._say(500, f"Job with submission_id {request['submission_id']} already exists.")
            return
        self.server.requests[request["submission_id"]] = request
        self.server.put(request["submission_id"], "PENDING")
        self._say(200, {"submission_id": request["submission_id"]})

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _may(self) -> bool:
        given = self.server.authorization = self.headers.get("Authorization", "")
        if not self.server.token or given == f"Bearer {self.server.token}":
            return True
        self._say(403 if given else 401, "Unauthorized")
        return False

    def _say(self, code: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def job_server() -> Iterator[JobServer]:
    server = JobServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
