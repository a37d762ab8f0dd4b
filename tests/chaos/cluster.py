"""cluster: a Ray cluster of several nodes on this machine, each a tree of processes that can be lost at once.

    with started({"head": 1, "one": 4, "two": 4}) as cluster:       # name -> virtual CPUs, the head first
        ... troupe train RUN.yaml --address cluster.address ...
        cluster.lose("one")                                          # kill -9 of its raylet, agents and workers
        cluster.add("three", num_cpus=4)

Every node has a loopback address of its own, so that code which takes another node for itself is found out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.victims import survivors

START_S = 60.0
OBJECT_STORE_BYTES = 150 * 2**20
NOTICED_SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}
"""Environment in which a lost node is noticed after about 4 s; Ray's own settings take 18 s. Workers are as nice as those of `make up`."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node: `ray start --block` and everything below it."""

    name: str
    ip: str
    process: subprocess.Popen[bytes]

    def processes(self) -> dict[int, str]:
        """Title by process id of all that lives on this node, e.g. `ray::Collector.play`."""
        return {p.pid: title for p in _tree(self.process.pid) if (title := _title(p))}


class Cluster:
    """Nodes by name. Commands that connect to `address` take `environment`. Each has the custom resource `node_<name>`, so that something can be put there on purpose."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Args: folder: Ray's files; its path must be short (sockets). environment: of every node."""
        self._folder, self.environment = folder, {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
        self.nodes: dict[str, Node] = {}
        self.address = ""

    def add(self, name: str, *, num_cpus: int, is_awaited: bool = True) -> Node:
        """Starts a node, the head if it is the first; returns when it is up, or at once."""
        ip = f"127.0.0.{11 + len(list(self._folder.glob('*.log')))}"  # Ray takes 127.0.0.1 for "find out yourself"
        arguments = [
            "--node-ip-address",
            ip,
            "--num-cpus",
            str(num_cpus),
            "--resources",
            json.dumps({f"node_{name}": 1}),
        ]
        arguments += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats", "--log-color", "false"]
        arguments += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
        if self.nodes:
            arguments += ["--address", self.address]
        else:
            arguments += ["--head", "--port", "0", "--include-dashboard", "true", "--dashboard-port", "0"]
            arguments += ["--temp-dir", str(self._folder / "ray")]
        log = self._folder / f"{name}.log"
        ray = str(Path(sys.executable).parent / "ray")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [ray, "start", "--block", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        node = self.nodes[name] = Node(name=name, ip=ip, process=process)
        if is_awaited:
            self._wait_until_up(node, log)
        return node

    def lose(self, name: str) -> None:
        """kill -9 of everything on a node, raylet first; nothing of it says good-bye."""
        _kill(self.nodes.pop(name).process.pid)

    def where(self, title: str) -> dict[str, list[int]]:
        """Process ids by node of what runs under a title that contains `title`; nodes without are left out."""
        found = {name: [pid for pid, t in node.processes().items() if title in t] for name, node in self.nodes.items()}
        return {name: pids for name, pids in found.items() if pids}

    def stop(self) -> None:
        """Ends every node, the head last."""
        for name in [*reversed(self.nodes)]:
            self.lose(name)

    def _wait_until_up(self, node: Node, log: Path) -> None:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (text := log.read_text()):
            if node.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"node {node.name} did not start in {START_S:g} s: {text[-3000:]}")
            time.sleep(0.1)
        self.address = self.address or next(
            line.split("--address=")[1].strip(" '") for line in text.splitlines() if "--address=" in line
        )


@contextmanager
def started(cpus: Mapping[str, int], environment: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster of nodes by name with their virtual CPUs, the head first; it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="troupe-", dir="/tmp"))
    cluster = Cluster(folder, environment or {})
    try:
        for name, num_cpus in cpus.items():
            cluster.add(name, num_cpus=num_cpus)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _kill(pid: int) -> None:
    victims = _tree(pid)
    # What a raylet has started leaves its tree when it dies: all are listed before the first is killed.
    for victim in sorted(victims, key=lambda p: "raylet" not in _title(p)[:200]):
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    survivors(victims, timeout_s=10)
