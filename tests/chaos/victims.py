"""victims: what can die, freeze or fill up, in which stages it works, and how to find it among the processes of a cluster of our own."""

from __future__ import annotations

import errno
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from pipelines.stages.table import STAGES

Door = Literal["local", "small disk", "jobs", "airflow"]
"""Who walks the stages: `troupe train`, the same with its stores on a small disk, `troupe submit --stage`, a DAG run."""
Blow = Literal["kill -9", "SIGTERM", "Ctrl-C twice", "SIGSTOP", "full disk"]
FROZEN_S = 40.0
"""How long SIGSTOP lasts: longer than a lease, and than Ray waits for a node."""
FULL_S = 20.0
"""How long the disk of the run is full: a command that is given again meets it, too."""
RAYLET = "raylet/raylet "
SAMPLING = ("collect", "evaluate")
SERVING = ("collect", "sync", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One kind of process, or a whole machine."""

    name: str
    door: Door
    stages: Sequence[str]
    """In which it works; in the others there is nothing to kill."""
    title: str = ""
    """What the command line of such a process contains; empty: found in another way."""
    blow: Blow = "kill -9"

    @property
    def restarted_by_hand(self) -> bool:
        """True where nothing of Troupe's can bring it back: a service manager, a platform or a person starts it again."""
        return self.name in ("driver", "job", "cluster", "scheduler", "triggerer")

    @property
    def loses_node(self) -> bool:
        """True where Ray loses a node by it, for which the platform gives a new one."""
        return self.name == "node" or self.title == RAYLET


VICTIMS = (
    Victim(name="driver", door="local", stages=tuple(STAGES)),
    Victim(name="collector", door="local", stages=SAMPLING, title="ray::Collector"),
    Victim(name="writer", door="local", stages=SAMPLING, title="ray::Writer"),
    Victim(name="play task", door="local", stages=SAMPLING, title="ray::MapBatches(play)"),
    Victim(name="store actor", door="local", stages=SAMPLING, title="ray::MapWorker(MapBatches(StoreBlocks"),
    Victim(name="replica", door="local", stages=SERVING, title="ray::ServeReplica:"),
    Victim(name="engine", door="local", stages=SERVING, title="VLLM::EngineCore"),
    Victim(name="serve controller", door="local", stages=SERVING, title="ray::ServeController"),
    Victim(name="trainer worker", door="local", stages=("train",), title="ray::RayTrainWorker"),
    Victim(name="trainer supervisor", door="local", stages=("train",), title="ray::TrainerSupervisor"),
    Victim(name="train controller", door="local", stages=("train",), title="ray::TrainController"),
    Victim(name="node", door="local", stages=tuple(STAGES)),
    Victim(name="cluster", door="local", stages=tuple(STAGES)),
    Victim(name="raylet", door="local", stages=tuple(STAGES), title=RAYLET),
    Victim(name="driver, SIGTERM", door="local", stages=tuple(STAGES), blow="SIGTERM"),
    Victim(name="driver, Ctrl-C twice", door="local", stages=tuple(STAGES), blow="Ctrl-C twice"),
    Victim(name="driver, frozen", door="local", stages=tuple(STAGES), blow="SIGSTOP"),
    Victim(name="trainer worker, frozen", door="local", stages=("train",), title="ray::RayTrainWorker", blow="SIGSTOP"),
    Victim(name="serve controller, frozen", door="local", stages=SERVING, title="ray::ServeController", blow="SIGSTOP"),
    Victim(name="raylet, frozen", door="local", stages=tuple(STAGES), title=RAYLET, blow="SIGSTOP"),
    Victim(name="disk, full", door="small disk", stages=tuple(STAGES), blow="full disk"),
    Victim(name="job", door="jobs", stages=tuple(STAGES), title="troupe stage"),
    Victim(name="scheduler", door="airflow", stages=tuple(STAGES)),
    Victim(name="triggerer", door="airflow", stages=tuple(STAGES)),
    Victim(name="task process", door="airflow", stages=tuple(STAGES)),
)
"""The table: a cell of it is one victim in one stage."""
BY_NAME = {victim.name: victim for victim in VICTIMS}
WORKERS = tuple(dict.fromkeys(v.title for v in VICTIMS if v.title.startswith("ray::")))


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, those above first."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    """Command line as a process shows it."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def find(wanted: str, pids: Iterable[int]) -> list[psutil.Process]:
    """Processes below these whose title contains `wanted`, shells left out."""
    found = [p for pid in pids for p in tree(pid) if wanted in title(p)]
    return [p for p in found if not title(p).startswith(("/bin/sh", "sh ", "/bin/bash", "bash "))]


def workers_of(stage: str) -> tuple[str, ...]:
    """Kinds of workers that have something to do in a stage."""
    return tuple(v.title for v in VICTIMS if v.title in WORKERS and stage in v.stages)


def count_workers(titles: Iterable[str]) -> list[str]:
    """How many of each kind of worker, as `2 x ray::Collector`; kinds without any are left out."""
    shown = list(titles)
    counts = ((sum(kind in title for title in shown), kind) for kind in WORKERS)
    return [f"{count} x {kind}" for count, kind in counts if count]


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, whoever is gone already left alone."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def strike(blow: Blow, processes: Iterable[psutil.Process], disk: Path) -> None:
    """Does it; returns at once, or when what is frozen or full has been so long enough. Args: disk: a folder on the disk that is filled."""
    if blow == "kill -9":
        kill(processes)
    elif blow == "SIGTERM":
        _send(signal.SIGTERM, processes)
    elif blow == "Ctrl-C twice":
        _send(signal.SIGINT, processes)
        time.sleep(0.3)
        _send(signal.SIGINT, processes)
    elif blow == "SIGSTOP":
        frozen = list(processes)
        _send(signal.SIGSTOP, frozen)
        time.sleep(FROZEN_S)
        _send(signal.SIGCONT, frozen)
    else:
        filling = disk / "filling"
        try:
            deadline = time.monotonic() + FULL_S
            while time.monotonic() < deadline:  # again and again: others delete their own half-written files
                _fill(filling)
                time.sleep(0.2)
        finally:
            filling.unlink(missing_ok=True)


def _send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (2**20, 2**12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def survivors(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Which of them still run after `timeout_s`; one that nobody has reaped yet does not."""
    deadline, left = time.monotonic() + timeout_s, list(processes)
    while (left := [p for p in left if _is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def moment(seed: int, victim: str, stage: str, number: int) -> float:
    """The share of the stage after which the kill comes: random, and the same for the same seed."""
    return round(random.Random(f"{seed}/{victim}/{stage}/{number}").uniform(0.1, 0.85), 3)


def cells(names: Iterable[str], stages: Iterable[str], num_moments: int) -> Iterator[tuple[Victim, str, int]]:
    """Every cell of the table that applies, once per moment."""
    wanted, among = set(names), set(stages)
    for number in range(num_moments):
        for victim in VICTIMS:
            if victim.name in wanted:
                yield from ((victim, stage, number) for stage in victim.stages if stage in among)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
