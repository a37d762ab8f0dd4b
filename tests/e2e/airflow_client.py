"""A real Airflow with a Ray head, started by `infra/airflow.sh` in a folder of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from tests.chaos import victims
from tests.servers import free_port

ROOT = Path(__file__).parents[2]
OPENER = build_opener(ProxyHandler({}))


@dataclass
class LocalAirflow:
    """`make airflow` with ports and state of its own; DAGs start paused."""

    folder: Path
    run_configs: str
    more: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ports = {name: free_port() for name in ("AIRFLOW", "MLFLOW", "RAY", "RAY_DASHBOARD")}
        self.url = f"http://127.0.0.1:{ports['AIRFLOW']}"
        self.jobs_url = f"http://127.0.0.1:{ports['RAY_DASHBOARD']}"
        self.ray_address = f"127.0.0.1:{ports['RAY']}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "RAY_ADDRESS"))},
            **{f"TROUPE_{name}_PORT": str(port) for name, port in ports.items()},
            "TROUPE_CACHE": str(self.folder),
            "TROUPE_MLFLOW_URI": f"sqlite:///{self.folder}/mlflow-ui.db",
            "TROUPE_RUN_CONFIGS": self.run_configs,
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            **self.more,
        }

    def __enter__(self) -> Self:
        self._script("infra/airflow.sh", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._script("infra/airflow.sh", "down")
        victims.kill(victims.tree(self.head_pid))  # with engines on it Ray takes half a minute to end in order
        self._script("infra/ray_head.sh", "down")

    @property
    def head_pid(self) -> int:
        """Process id of the Ray head, which is above those of all jobs."""
        return int((self.folder / "ray" / "head").read_text().partition(" ")[0])

    def _script(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, path: str, method: str = "GET", **body: Any) -> Any:
        """Airflow's REST API."""
        data = json.dumps(body).encode() if body else None
        request = Request(
            f"{self.url}/api/v2{path}", data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with OPENER.open(request, timeout=90) as answer:  # a writer waits 60 s for another
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()[:2000]}") from None

    def wait(self, what: str, ready: Callable[[], Any], timeout_s: float) -> Any:
        """The first truthy value of `ready`; fails with Airflow's last log lines."""
        deadline = time.monotonic() + timeout_s
        while not (found := ready()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not after {timeout_s:g} s; {self.failures()}")
            time.sleep(1)  # each question is 0.1 s of the API server's CPU
        return found

    def pause(self, dag: str, *, is_paused: bool) -> None:
        self.ask(f"/dags/{dag}", "PATCH", is_paused=is_paused)

    def trigger(self, dag: str, dag_run: str, **conf: Any) -> None:
        self.ask(f"/dags/{dag}/dagRuns", "POST", logical_date=None, dag_run_id=dag_run, conf=conf)

    def dag_runs(self, dag: str) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(self.ask(f"/dags/{dag}/dagRuns?limit=100&order_by=id")["dag_runs"])

    def state(self, dag: str, dag_run: str) -> str:
        return str(self.ask(f"/dags/{dag}/dagRuns/{quote(dag_run)}")["state"])

    def tasks(self, dag: str, dag_run: str) -> list[dict[str, Any]]:
        return list(self.ask(f"/dags/{dag}/dagRuns/{quote(dag_run)}/taskInstances?limit=100")["task_instances"])

    def xcom(self, dag: str, dag_run: str, task: str, key: str) -> Any:
        path = f"/dags/{dag}/dagRuns/{quote(dag_run)}/taskInstances/{task}/xcomEntries/{key}?deserialize=true"
        return self.ask(path)["value"]

    def log(self, dag: str, dag_run: str, task: str, attempt: int = 1) -> str:
        """What a person sees of a task's log."""
        path = f"/dags/{dag}/dagRuns/{quote(dag_run)}/taskInstances/{task}/logs/{attempt}?full_content=true"
        lines = self.ask(path)["content"]
        return "\n".join(str(line["event"] if isinstance(line, dict) else line) for line in lines)

    def asked(self, path: str) -> Any:
        """What a person is asked there; None while nothing is."""
        try:
            return self.ask(path)
        except AssertionError as error:
            if " 404 " in str(error):
                return None
            raise

    def failures(self) -> str:
        """Failed task instances, and the end of Airflow's own log."""
        found = self.ask("/dags/~/dagRuns/~/taskInstances?limit=100")["task_instances"]
        bad = [
            f"{t['dag_id']} {t['task_id']} {t['state']} try {t['try_number']}" for t in found if t["state"] != "success"
        ]
        return f"{bad}\n" + "\n".join((self.folder / "airflow" / "airflow.log").read_text().splitlines()[-30:])
