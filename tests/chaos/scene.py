"""scene: one run, the cluster it lives on, and the doors through which it is driven. All processes are our own.

Scene ── world: head ── one, two, three (nodes)     Local: troupe train          (driver)
      └─ run: journal, traces, weights              Jobs:  troupe submit --stage (Ray jobs)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from tests.chaos import checks, victims
from tests.chaos.cluster import NOTICED_SOON, Cluster
from tests.chaos.victims import Victim

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).parent / "run.yaml"
TROUPE = str(Path(sys.executable).parent / "troupe")
NODES = {"head": 0, "one": 2, "two": 2, "three": 2}
"""Virtual CPUs: none on the head, so that all work is on nodes that can be lost; without one, the rest still has room."""
ON_ONE_NODE = 0.1
"""CPUs per trainer worker: all of a run, or of a trainer beside it, fits on one node."""
ASK_TIMEOUT_S = 240.0
MAX_RESTARTS = 6
"""Of a command, within one iteration beyond one per kill."""


class Lost(AssertionError):
    """A run that did not come through."""


class World:
    """A Ray cluster of three nodes that can be lost in part or whole and is put up again."""

    def __init__(self) -> None:
        self._folder = Path("/nonexistent")
        """Ray's files; made anew by each `up`."""
        self.cluster = Cluster(self._folder, {})
        self._num_fresh = 0
        self._fresh: threading.Thread | None = None

    def up(self) -> None:
        """A new cluster."""
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        path = os.pathsep.join([str(Path(TROUPE).parent), os.environ["PATH"]])  # jobs are started as `troupe ...`
        self.cluster = Cluster(self._folder, {**NOTICED_SOON, "PATH": path})
        for name, num_cpus in NODES.items():
            self.cluster.add(name, num_cpus=num_cpus)

    def down(self) -> None:
        """kill -9 of everything."""
        if self._fresh:
            self._fresh.join(timeout=90)
        self._fresh = None
        self.cluster.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def lose(self, node: str) -> None:
        """kill -9 of a node; one that is still on its way up is waited for."""
        self.complete()
        self.cluster.lose(node)

    def begin_to_complete(self) -> None:
        """`complete`, behind the scenes."""
        self._fresh = threading.Thread(target=self._complete, daemon=True)
        self._fresh.start()

    def complete(self) -> None:
        """Returns with a fresh node for each one lost, as a platform gives."""
        if self._fresh:
            self._fresh.join(timeout=90)
        self._complete()

    def _complete(self) -> None:
        while len(self.cluster.nodes) < len(NODES):
            self._num_fresh += 1
            self.cluster.add(f"fresh{self._num_fresh}", num_cpus=NODES["one"])

    @property
    def environment(self) -> dict[str, str]:
        """In which commands find this cluster: the same command works on the next one, too."""
        return {**self.cluster.environment, "RAY_ADDRESS": self.cluster.address, "RAY_API_SERVER_ADDRESS": self._jobs}

    @property
    def _jobs(self) -> str:
        found = re.search(r"RAY_API_SERVER_ADDRESS='([^']+)'", (self._folder / "head.log").read_text())
        return found[1] if found else ""

    def pids(self) -> list[int]:
        """Tops of the process trees of the nodes."""
        return [node.process.pid for node in self.cluster.nodes.values()]

    def busiest(self, stage: str) -> str:
        """The node, not the head, with most workers of those that work in a stage, then with most of all."""
        kinds = victims.workers_of(stage)

        def count(name: str) -> tuple[int, int, str]:
            titles = list(self.cluster.nodes[name].processes().values())
            at_work, workers = (
                sum(kind in title for title in titles for kind in wanted) for wanted in (kinds, victims.WORKERS)
            )
            return at_work, workers, name

        return max(list(self.cluster.nodes)[1:], key=count)


class Door:
    """Who walks the stages of one iteration. A command that ends in failure is given again, as it was."""

    pause_s = 0.02
    """Between two looks whether a stage is done."""
    more_s = 0.0
    """How much longer than the stage itself its part of the walk takes."""

    def __init__(self, scene: Scene, iteration: int) -> None:
        self.scene, self.iteration = scene, iteration
        self.num_restarts = self.num_kills = self._num_before = 0
        self.codes: list[int] = []
        self._commands = self._all_commands()
        self._process: subprocess.Popen[bytes] | None = None
        self.look()

    def _all_commands(self) -> list[list[str]]:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Of the command that runs now."""
        return self._process.pid if self._process else 0

    def look(self) -> bool:
        """Goes on with the next command, or again with one that failed; True once all are done."""
        code = self._process.poll() if self._process else 0
        if code is None:
            return False
        if self._process and code == 0:
            self._commands.pop(0)
        elif self._process:
            self.codes.append(code)
            self.num_restarts += 1
            if self.num_restarts > MAX_RESTARTS + self.num_kills:
                raise Lost(f"ended {self.num_restarts} times: exit codes {self.codes}; {self.scene.last_lines()}")
        if not self._commands:
            self._process = None
            return True
        with self.scene.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._commands[0], cwd=ROOT, env=self.scene.world.environment, stdout=out, stderr=subprocess.STDOUT
            )
        return False

    def targets(self, victim: Victim) -> list[psutil.Process]:
        """Processes that are this victim now; the machine's and the cluster's are found by the scene."""
        if not victim.title:
            return victims.tree(self.pid)[:1]
        return victims.find(victim.title, self.scene.world.pids())

    def after_kill(self, victim: Victim, dependants: Iterable[psutil.Process]) -> None:
        """What others than Troupe do about a death; `look` gives commands again."""

    def began_at(self, run: Run, stage: str) -> float | None:
        """When the stage that runs now began (unix seconds); None while it does not run."""
        row = checks.running(run, stage, self.iteration)
        return row.started_at if row else None

    def settled_at(self, run: Run, stage: str) -> float | None:
        """When the stage was done (unix seconds); None while it is not."""
        rows = [row for row in run.journal.stages(run.run_id, self.iteration) if row.stage == stage]
        return max(row.ended_at or 0.0 for row in rows) if checks.is_done(run, stage, self.iteration) else None

    def recovered_by(self, victim: Victim, stage: str) -> tuple[str, int]:
        """What brought the stage to its end after the last kill, and how many commands that took."""
        num_restarts, self._num_before = self.num_restarts - self._num_before, self.num_restarts
        return ("same command" if num_restarts else "itself"), num_restarts

    def end(self) -> None:
        """Ends the command, if one runs."""
        if self._process:
            self._process.kill()
            self._process.wait(timeout=10)


class Local(Door):
    """`troupe train`, up to this iteration."""

    def _all_commands(self) -> list[list[str]]:
        return [[TROUPE, "train", str(CONFIG), *self.scene.settings(self.iteration)]]


class Jobs(Door):
    """`troupe submit`, stage by stage; first of all `troupe begin`, if the run is new."""

    def _all_commands(self) -> list[list[str]]:
        settings = self.scene.settings(self.iteration)
        begin = [TROUPE, "begin", "--run", str(CONFIG), *settings, "--claim", f"chaos-{self.iteration}"]
        commands = [begin] if self.iteration == 1 else []
        for stage in STAGES:
            groups = list(self.scene.run.config.model_groups) if stage == "train" else [""]
            for group in groups:
                more = ["--model-group", group] if group else []
                at = ["--stage", stage, "--iteration", str(self.iteration), *more]
                commands.append([TROUPE, "submit", str(CONFIG), *settings, *at])
        return commands


class Scene:
    """A run in a folder of its own on a world of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log.txt"
        root.mkdir(parents=True, exist_ok=True)
        self.world = World()
        self.iteration = 0
        """The last one that is finished."""
        self._iterations = 1

    def settings(self, iterations: int) -> list[str]:
        """Options of commands of this run."""
        return ["--set", f"storage.root={self.root}", "--set", f"iterations={iterations}"]

    @property
    def run(self) -> Run:
        """The run, opened afresh."""
        return Run(load_config(CONFIG, {"storage.root": str(self.root), "iterations": self._iterations}))

    def begin(self, iteration: int) -> None:
        """Says up to which iteration the run goes now."""
        self._iterations = iteration

    def served(self) -> dict[str, list[int]]:
        """What every replica says it serves, by model group."""
        return json.loads(self.ask("served"))

    def ask(self, question: str) -> str:
        """What `tests.chaos.ask` answers, in a process of its own that connects to the world."""
        try:
            asked = subprocess.run(
                [sys.executable, "-m", "tests.chaos.ask", question, str(self.root), str(self._iterations)],
                cwd=ROOT,
                env=self.world.environment,
                capture_output=True,
                text=True,
                timeout=ASK_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Lost(f"{question}: no answer in {ASK_TIMEOUT_S:g} s") from None
        if asked.returncode:
            raise Lost(f"{question}: {asked.stderr[-2000:]}")
        return asked.stdout.splitlines()[-1]

    def last_lines(self) -> str:
        """The end of what the commands printed."""
        return self.log.read_text(errors="replace")[-1500:] if self.log.is_file() else ""


def wait(what: str, test: Callable[[], Any], *, door: Door, timeout_s: float, pause_s: float = 0.01) -> Any:
    """The first truthy value of `test`, while the door goes on; Lost with the last lines after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        door.look()
        if time.monotonic() > deadline:
            raise Lost(f"waited {timeout_s:g} s for {what}; exit codes {door.codes}; {door.scene.last_lines()}")
        time.sleep(pause_s)
    return found


def undisturbed(root: Path, iterations: int, *, timeout_s: float) -> Run:
    """The twin: the same run, with nothing killed, on a cluster that ends with its command; what is there is kept."""
    root.mkdir(parents=True, exist_ok=True)
    run = Run(load_config(CONFIG, {"storage.root": str(root), "iterations": iterations}))
    if Path(run.folder).is_dir() and run.journal.ref(run.key(iterations, "record")) is not None:
        return run
    settings = ["--set", f"storage.root={root}", "--set", f"iterations={iterations}"]
    settings += ["--set", f"train.cpus_per_worker={ON_ONE_NODE}"]
    with (root / "log.txt").open("ab") as out:
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        process = subprocess.Popen(
            [TROUPE, "train", str(CONFIG), *settings], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=timeout_s)
        finally:
            victims.kill(victims.tree(process.pid))
    if code:
        raise Lost(f"the undisturbed run ended with {code}: {(root / 'log.txt').read_text()[-3000:]}")
    return run


def durations(run: Run) -> Mapping[str, float]:
    """Median seconds of each stage of a finished run, the first iteration left out where there are others."""
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for row in run.journal.stages(run.run_id):
        if row.stage in found and row.seconds is not None and row.iteration > 0:
            found[row.stage].append(row.seconds)
    return {stage: _median(seconds[1:] or seconds) for stage, seconds in found.items()}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
