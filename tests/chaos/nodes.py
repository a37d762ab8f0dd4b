"""nodes: a run over three Ray nodes loses one in each stage. `python -m tests.chaos.nodes [--small] [STAGE ...]`

    cluster:    head ── one, two, three     iteration 1: a node is lost in collect, a fresh one joins afterwards
    troupe train --address ...              iteration 2: in score ...

The command that runs is started again where it ends with anything but success, as a scheduler would.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from pipelines.config import load_config
from pipelines.run import Run
from pipelines.stages import STAGES
from stores.journal import StageRow
from stores.types import Purpose, TracesRef
from tests.chaos.cluster import NOTICED_SOON, Cluster, started

CONFIG = Path(__file__).parents[1] / "e2e" / "nodes.yaml"
CPUS = 2
"""Virtual CPUs of a node: room for one large trainer worker and much that is small."""
NODES = {"head": CPUS, "one": CPUS, "two": CPUS}
WORKERS_ONLY = {"head": 0, "one": CPUS, "two": CPUS, "three": CPUS}
"""The same beside a head that does no work, as clusters are run: all that works can be lost."""
DEADLINE_S = 500.0
"""For anything that is waited for: starting everything takes a minute on two idle cores, much longer on busy ones."""
ONE_GROUP = "model_groups={team: {agents: [solver, verifier, refiner, finalizer], train: {num_workers: 2, cpus_per_worker: 1.1}}}"
"""Half the engines and trainers, for whom time is short."""
COLLECTOR, REPLICA, TRAINER = "ray::Collector", "ray::ServeReplica", "ray::RayTrainWorker"
WORKS_IN = {
    "collect": (COLLECTOR, REPLICA),
    "score": (COLLECTOR, REPLICA, TRAINER),
    "train": (TRAINER,),
    "sync": (REPLICA,),
    "evaluate": (COLLECTOR, REPLICA),
    "promote": (REPLICA, TRAINER),
}
"""Whose node is lost in each stage: the one with most of these."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One lost node and what came of it."""

    stage: str
    iteration: int
    node: str
    lost: Mapping[str, int]
    """How many collectors, replicas and trainer workers died with it."""
    spread: Mapping[str, int]
    """On how many nodes there were some before."""
    seconds: float
    """From the loss to the end of the stage."""
    num_restarts: int
    """How often the command had to be started again."""


@dataclass(kw_only=True)
class Command:
    """`troupe train` on a cluster, started again where it fails."""

    run: Run
    cluster: Cluster
    changes: list[str]
    codes: list[int] = field(default_factory=list)
    """Exit codes so far."""

    def __post_init__(self) -> None:
        self.log = Path(self.run.config.storage.root) / "log.txt"
        self._start()

    def _start(self) -> None:
        troupe = str(Path(sys.executable).parent / "troupe")
        changes = [part for change in self.changes for part in ("--set", change)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [troupe, "train", str(CONFIG), *changes, "--address", self.cluster.address],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.cluster.environment,
            )

    def look(self) -> None:
        """Starts the command again if it has ended in failure; at most five times."""
        code = self.process.poll()
        if code:
            self.codes.append(code)
            assert len(self.codes) <= 5, self.log.read_text()[-5000:]
            self._start()

    def wait(self, timeout_s: float) -> None:
        """Returns when the run is finished."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() != 0:
            self.look()
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the command, if it still runs."""
        self.process.kill()
        self.process.wait(timeout=10)


def run_of(changes: Iterable[str]) -> Run:
    """The run of CONFIG with changes of the form KEY=VALUE."""
    parts = (change.partition("=") for change in changes)
    return Run(load_config(CONFIG, {key: yaml.safe_load(value) for key, _, value in parts}))


def lose_in(stage: str, iteration: int, command: Command) -> Loss:
    """Waits for the stage, loses the node where most of its work is done, and waits for the stage's end."""
    _wait(command, lambda: _is_at_work(command.run, stage, iteration), f"{stage} of iteration {iteration}")
    assert not _row(command.run, stage, iteration, is_done=True), f"{stage} of iteration {iteration} is over already"
    cluster = command.cluster
    node = max(list(cluster.nodes)[1:], key=lambda name: (sum(_workers(cluster, name, WORKS_IN[stage]).values()), name))
    lost = _workers(cluster, node, (COLLECTOR, REPLICA, TRAINER))
    spread = {title.removeprefix("ray::"): len(cluster.where(title)) for title in (COLLECTOR, REPLICA, TRAINER)}
    began, num_before = time.monotonic(), len(command.codes)
    cluster.lose(node)
    _wait(command, lambda: _row(command.run, stage, iteration, is_done=True), f"{stage} after the loss of {node}")
    return Loss(
        stage=stage,
        iteration=iteration,
        node=node,
        lost=lost,
        spread=spread,
        seconds=time.monotonic() - began,
        num_restarts=len(command.codes) - num_before,
    )


def faults_of(run: Run, before: Iterable[StageRow]) -> list[str]:
    """What is wrong with a finished run: doubled or lost episodes, changed refs, versions that do not follow."""
    faults = []
    now = {row.key: row for row in run.journal.stages(run.run_id)}
    faults += [f"{row.key} was done and changed" for row in before if row.status == "done" and now[row.key] != row]
    per_iteration = run.config.collect.tasks_per_iteration * run.config.collect.episodes_per_task
    for iteration in range(1, run.config.iterations + 1):
        ref = TracesRef(**run.journal.ref(run.key(iteration, "collect"))["traces"])
        ids = [trace.episode_id for trace in run.traces.read_traces(ref)]
        if not len(ids) == len(set(ids)) == per_iteration:
            faults.append(
                f"iteration {iteration} has {len(ids)} episodes, {len(set(ids))} different, not {per_iteration}"
            )
        for group, model in run.trained(iteration).items():
            parent = run.weights.manifest(model).parent
            if (model.version, parent) != (iteration, iteration - 1):
                faults.append(f"{group} v{model.version} of iteration {iteration} was trained from v{parent}")
            run.weights.verify(model)
    found = run.traces.find_traces(run_id=run.run_id, limit=100_000)
    if len({trace.episode_id for trace in found}) != len(found):
        faults.append("an episode is stored twice")
    return faults


SERVED = """
import json, sys
from pipelines.cluster import connect
from pipelines.serving import app_names
from serve_apps.deployment import served_versions
from tests.chaos.nodes import run_of
run = run_of(sys.argv[2:])
connect(sys.argv[1])
apps = app_names(run)
served = served_versions(apps.values())
print(json.dumps({group: sorted(set(served[app].values())) for group, app in apps.items()}))
"""


def served_now(command: Command) -> str:
    """Versions by model group that the replicas say they serve, as JSON."""
    arguments = [command.cluster.address, *command.changes]
    asked = subprocess.run(
        [sys.executable, "-c", SERVED, *arguments],
        capture_output=True,
        text=True,
        env=command.cluster.environment | {"PYTHONPATH": str(CONFIG.parents[2])},
        timeout=120,
        check=True,
    )
    return asked.stdout.splitlines()[-1]


def _wait(command: Command, test: object, what: str) -> None:
    assert callable(test)
    deadline = time.monotonic() + DEADLINE_S
    while not test():
        command.look()
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}: {command.log.read_text()[-5000:]}"
        time.sleep(0.01)


def _row(run: Run, stage: str, iteration: int, *, is_done: bool) -> bool:
    rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage == stage]
    if is_done:
        wanted = len(run.config.model_groups) if stage == "train" else 1
        return sum(row.status == "done" for row in rows) == wanted
    return any(row.status == "running" for row in rows)


def _is_at_work(run: Run, stage: str, iteration: int) -> bool:
    if not _row(run, stage, iteration, is_done=False):
        return _row(run, stage, iteration, is_done=True)
    if stage == "train":
        time.sleep(0.3)
    if stage in ("collect", "evaluate"):
        purpose = Purpose.TRAIN if stage == "collect" else Purpose.GATE
        return bool(run.traces.find_traces(run_id=run.run_id, iteration=iteration, purpose=purpose, limit=1))
    return True


def _workers(cluster: Cluster, node: str, titles: Iterable[str]) -> dict[str, int]:
    found = cluster.nodes[node].processes().values()
    counts = {title: sum(title in shown for shown in found) for title in titles}
    return {title.removeprefix("ray::"): count for title, count in counts.items() if count}


def main(stages: list[str], changes: list[str]) -> None:
    """A run of as many iterations as stages; each loses a node in its stage."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster ends with this process
    with TemporaryDirectory() as root, started(WORKERS_ONLY, NOTICED_SOON) as cluster:
        changes = [f"storage.root={root}", f"iterations={len(stages)}", "evaluate.every=1", *changes]
        command = Command(run=run_of(changes), cluster=cluster, changes=changes)
        run = command.run
        began = time.monotonic()
        try:
            for iteration, stage in enumerate(stages, start=1):
                loss = lose_in(stage, iteration, command)
                print(f"{time.monotonic() - began:6.1f} s  {loss}", flush=True)
                cluster.add(f"fresh{iteration}", num_cpus=CPUS, is_awaited=False)
            before = [row for row in run.journal.stages(run.run_id) if row.iteration < len(stages)]
            command.wait(DEADLINE_S)
            print("faults:", faults_of(run, before), "served:", served_now(command), "exit codes:", command.codes)
        finally:
            with suppress(ProcessLookupError):
                command.stop()
            print(command.log.read_text()[-6000:])


if __name__ == "__main__":
    arguments = sys.argv[1:]
    small = [ONE_GROUP] if "--small" in arguments else []
    main([a for a in arguments if a != "--small"] or list(STAGES), small)
