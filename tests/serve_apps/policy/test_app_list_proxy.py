"""Serve's and MLflow's clients ask a dashboard and a server on this machine where everything else goes through a proxy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_apps.policy import app_list
from serve_apps.policy.app_list import AppList
from stores.registry.experiment import connect

pytestmark = pytest.mark.test


class Machine:
    """Answers as Ray's dashboard and as MLflow, as far as the clients ask, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(f"{self.command} {self.path.partition('?')[0]}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"version": "4", "ray_version": "2.60.0", "experiments": []}).encode())

            do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    machine = Machine()
    yield machine
    machine.server.shutdown()
    machine.server.server_close()


def test_serves_client_deploys_on_this_machine(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_list, "dashboard_url", lambda: machine.url)
    assert AppList(str(tmp_path / "apps.json")).replace(0, {})
    assert machine.asked[-1] == "PUT /api/serve/applications/"


def test_an_mlflow_server_on_this_machine_is_asked_directly(machine: Machine) -> None:
    connect(machine.url)
    assert machine.asked == ["POST /api/2.0/mlflow/experiments/search"]
