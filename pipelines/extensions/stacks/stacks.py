"""stacks: every process that works for a run, on every node -> what each of them is doing, at the end of a text file.

    this machine ── py-spy ────────┬──> <run folder>/stacks/<stage>-<iteration>-<time>.txt
    other nodes  ── a Ray task each┘

Which ones: below the raylets of its Ray session every worker that has a task or an actor, with what
they started: collectors, replicas and their engines, trainers with controller and supervisor. On a cluster that several
runs share, theirs too. py-spy reads from outside, so that a process that hangs in C or was stopped is shown as well.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from stores.inside_ray import session_name

MAX_PROCESSES = 64
"""Per machine."""
DUMP_TIMEOUT_S = 10.0
NODES_TIMEOUT_S = 20.0
WITHOUT_TASK = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::stacks_here")


def add_stacks(path: Path) -> None:
    """Adds to the file, nearest processes first; a node that does not answer in NODES_TIMEOUT_S is named in it."""
    session = session_name()
    if not session:
        return
    with path.open("a") as file:  # part by part: a later part that fails leaves the earlier ones
        file.write(f"\n== processes of {session} on this machine\n{stacks_here(session)}\n")
        file.flush()
        for node, text in _stacks_elsewhere(session):
            file.write(f"\n== processes of {session} on node {node}\n{text}\n")


def stacks_here(session: str) -> str:
    """The stacks of the session's processes on this machine."""
    chosen = list(processes_of(session))
    with ThreadPoolExecutor(max_workers=4) as pool:
        parts = list(pool.map(_dump, chosen[:MAX_PROCESSES]))
    if len(chosen) > MAX_PROCESSES:
        parts.append(f"and {len(chosen) - MAX_PROCESSES} more processes")
    return "\n\n".join(parts) or "none"


def processes_of(session: str) -> Iterable[psutil.Process]:
    """What the raylets of a Ray session on this machine have started, but for Ray's own helpers and idle workers."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and any(session in part for part in process.info["cmdline"] or ()):
            yield from (child for child in _children(process) if not _title(child).startswith(WITHOUT_TASK))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "ended"


def _headline(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            memory, cpu = process.memory_info().rss / 2**20, process.cpu_times()
            return (
                f"-- pid {process.pid} ({process.status()}), {memory:.0f} MiB, {cpu.user + cpu.system:.1f} s of CPU: "
                f"{' '.join(process.cmdline()).strip()[:200]}"
            )
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return f"-- pid {process.pid} has ended"


def _dump(process: psutil.Process) -> str:
    """Head line and Python stacks of one process; without pausing it where it is stopped already."""
    head = _headline(process)
    tool = _py_spy()
    if tool is None:
        return f"{head}\npy-spy is not installed"
    is_stopped = "(stopped)" in head
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(process.pid), *(["--nonblocking"] if is_stopped else [])],
            capture_output=True,
            text=True,
            timeout=DUMP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{head}\npy-spy had no stack after {DUMP_TIMEOUT_S:g} s"
    if done.returncode != 0:
        return f"{head}\npy-spy cannot read it: {done.stderr.strip().splitlines()[:1]}"
    return f"{head}\n{done.stdout.strip()}"


def _py_spy() -> str | None:
    """Ray's dashboard brings it along, beside this interpreter."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _stacks_elsewhere(session: str) -> list[tuple[str, str]]:
    """(address, stacks) of every other machine of the cluster."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.util.get_node_ip_address()
    others = {
        n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] != here
    }
    task: Any = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(session): address
        for address, node in others.items()
    }
    if not pending:
        return []
    ready, late = ray.wait(list(pending), num_returns=len(pending), timeout=NODES_TIMEOUT_S)
    dumps = []
    for ref in ready:
        try:
            dumps.append((pending[ref], ray.get(ref, timeout=5)))
        except ray.exceptions.RayError as error:
            dumps.append((pending[ref], f"not read: {type(error).__name__}: {error}"))
    return dumps + [(pending[ref], f"no answer after {NODES_TIMEOUT_S:g} s") for ref in late]
