"""airflow: the third door. A real Airflow walks the stages; its scheduler, triggerer and task processes are killed.

What of Airflow's is killed for good (scheduler, triggerer) is started again by the same command, as a service manager
does; how soon Airflow itself notices a death is set below its defaults of 30 s to 5 minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipelines.run.run import Run
from tests.chaos import checks, victims
from tests.chaos.scene import CONFIG, ON_ONE_NODE, Door, Lost, Scene, World
from tests.chaos.victims import Victim
from tests.e2e.airflow_client import LocalAirflow

AIRFLOW = str(Path(sys.executable).parent / "airflow")
DAG = "train_team__chaos"
SETTINGS = {
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
}
LOOK_EVERY_S = 0.5
MAX_ITERATIONS = 12


class AirflowWorld(World):
    """`make airflow` in a folder of its own: Airflow, a Ray head, MLflow's pages."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.airflow: LocalAirflow | None = None
        self._restarted: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        """Starts all; the DAG is there and paused no more."""
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        data = yaml.safe_load(CONFIG.read_text()) | {
            "iterations": MAX_ITERATIONS,
            "storage": {"root": str(self._root)},
            "schedule": {"retries": 4, "retry_delay_s": 1, "max_rejections": MAX_ITERATIONS},  # or the third one skips
        }
        data["train"]["cpus_per_worker"] = ON_ONE_NODE
        config = self._folder / "chaos.yaml"
        config.write_text(yaml.safe_dump(data))
        self.airflow = LocalAirflow(self._folder, str(config), SETTINGS)
        self.airflow.__enter__()
        known = self.airflow
        known.wait("the DAG", lambda: DAG in {d["dag_id"] for d in known.ask("/dags")["dags"]}, 90)
        known.pause(DAG, is_paused=False)

    def down(self) -> None:
        """Ends all."""
        left = [p for pid in self.pids() for p in victims.tree(pid)]
        if self.airflow:
            self.airflow.__exit__()
        victims.kill([*left, *(p for service in self._restarted for p in victims.tree(service.pid))])
        shutil.rmtree(self._folder, ignore_errors=True)

    def complete(self) -> None:
        """There are no nodes to replace."""

    @property
    def environment(self) -> dict[str, str]:
        """Where the Ray head is; it wants its token, which Ray looks for when it is imported."""
        assert self.airflow is not None
        return {**self.airflow.environment, "RAY_ADDRESS": self.airflow.ray_address, "RAY_AUTH_MODE": "token"}

    def pids(self) -> list[int]:
        """Tops of the process trees."""
        files = [self._folder / "airflow" / "airflow.pid", self._folder / "ray" / "head"]
        return [int(f.read_text().split()[0]) for f in files if f.is_file()] + [s.pid for s in self._restarted]

    def restart(self, service: str) -> None:
        """`airflow scheduler` or `airflow triggerer`, as the one that died was started."""
        assert self.airflow is not None
        top = psutil.Process(self.pids()[0])
        with (self._folder / f"{service}.log").open("ab") as out:
            self._restarted.append(
                subprocess.Popen(
                    [AIRFLOW, service], env=top.environ(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )


class Airflow(Door):
    """A DAG run of `train_team`, triggered by hand."""

    pause_s = LOOK_EVERY_S
    more_s = 5.0

    def __init__(self, scene: Scene, iteration: int) -> None:
        assert isinstance(scene.world, AirflowWorld) and scene.world.airflow is not None
        self._world, self._airflow = scene.world, scene.world.airflow
        self._dag_run = f"chaos-{iteration}"
        self._asked_at, self._state = 0.0, ""
        self._airflow.trigger(DAG, self._dag_run)
        super().__init__(scene, iteration)

    def _all_commands(self) -> list[list[str]]:
        return []

    def look(self) -> bool:
        """Whether the DAG run has succeeded; Lost if it has failed."""
        if time.monotonic() > self._asked_at + LOOK_EVERY_S:
            self._state = self._airflow.state(DAG, self._dag_run)
            self._asked_at = time.monotonic()
        if self._state == "failed":
            raise Lost(f"DAG run {self._dag_run} failed: {self._airflow.failures()}")
        return self._state == "success"

    def targets(self, victim: Victim) -> list[psutil.Process]:
        """Airflow's own processes."""
        if victim.name == "task process":
            return []
        return victims.find(f"airflow {victim.name}", self._world.pids())[:1]

    def task_process(self, stage: str) -> list[psutil.Process]:
        """The process that runs the stage's task, while there is one."""
        wanted = [f"airflow worker -- {task['id']}" for task in self._tasks(stage)]
        return [p for title in wanted for p in victims.find(title, self._world.pids())]

    def after_kill(self, victim: Victim, dependants: Iterable[psutil.Process]) -> None:
        """What a service manager does: it ends what is left of the service, and starts it again."""
        if victim.name in ("scheduler", "triggerer"):
            victims.kill(dependants)
            self._world.restart(victim.name)

    def began_at(self, run: Run, stage: str) -> float | None:
        """When the stage's task began: its job starts some seconds before the stage itself."""
        tasks = [task for task in self._tasks(stage) if task["state"] in ("running", "deferred")]
        return datetime.fromisoformat(tasks[0]["start_date"]).timestamp() if tasks else None

    def settled_at(self, run: Run, stage: str) -> float | None:
        """When the stage's tasks had succeeded."""
        tasks = self._tasks(stage)
        if not checks.is_done(run, stage, self.iteration) or not tasks:
            return None
        if any(task["state"] != "success" for task in tasks):
            return None
        return max(datetime.fromisoformat(task["end_date"]).timestamp() for task in tasks)

    def recovered_by(self, victim: Victim, stage: str) -> tuple[str, int]:
        """By what, and how many tries Airflow needed beyond the first."""
        tries = max(task["try_number"] for task in self._tasks(stage)) - 1
        if victim.name in ("scheduler", "triggerer"):
            return "same command", tries
        return ("Airflow retry" if tries else "itself"), tries

    def _tasks(self, stage: str) -> list[dict[str, Any]]:
        names = ("promote", "report") if stage == "promote" else (stage,)
        found = [task for task in self._airflow.tasks(DAG, self._dag_run) if task["task_id"] in names]
        return [task for task in found if task["state"] not in ("skipped", "removed")]

    def end(self) -> None:
        """Nothing more is triggered."""


def open_scene(root: Path) -> Scene:
    """A run that Airflow drives."""
    scene = Scene(root)
    scene.world = AirflowWorld(root)
    return scene
