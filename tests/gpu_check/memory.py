"""memory: nvidia-smi -> the GPUs of this machine, and how much of their memory was used at most while something ran."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total_gib: float


@dataclass(slots=True)
class Used:
    """The memory used on the fullest GPU, in GiB; None where there is no GPU."""

    peak_gib: float | None = None
    last_gib: float | None = None

    def add(self, used: list[float]) -> None:
        """Takes one reading, GiB by GPU."""
        if used:
            self.last_gib = max(used)
            self.peak_gib = max(self.last_gib, self.peak_gib or 0.0)


def gpus() -> list[Gpu]:
    """The GPUs that NVIDIA's driver shows; empty where there is none, or no driver."""
    rows = _ask("name,memory.total")
    return [
        Gpu(name=name.strip(), total_gib=float(total) / 1024) for name, total in (row.rsplit(",", 1) for row in rows)
    ]


def used_gib() -> list[float]:
    """Used memory in GiB by GPU, of all processes together; empty where there is no GPU."""
    return [float(row) / 1024 for row in _ask("memory.used")]


@contextmanager
def watched(read: Callable[[], list[float]] = used_gib) -> Iterator[Used]:
    """Reads the used memory five times a second inside the block, once at its start and once at its end."""
    used, stop = Used(), threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_S):
            used.add(read())

    used.add(read())
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield used
    finally:
        stop.set()
        thread.join()
        used.add(read())


def _ask(fields: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
