"""process: gives a process a name of its own among all, by which other processes can find out whether it has ended."""

from __future__ import annotations

import os
import socket
from functools import cache
from hashlib import sha256
from pathlib import Path

ALIVE = "alive"
"""The start of a process that is there, where /proc does not say when it began."""


@cache
def _host() -> str:
    """Names the set of processes in which a pid is unique: the machine since its boot, and the container."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        parts.append(boot.read_text().strip())
    if namespace.is_symlink():
        parts.append(os.readlink(namespace))
    return f"{parts[0]}~{sha256('/'.join(parts).encode()).hexdigest()[:8]}"


def this_process() -> str:
    """Names this process among all that ever run on any machine: host, pid and start time."""
    return f"{_host()} {os.getpid()} {_start_of(os.getpid())}"


def is_dead(process: str) -> bool:
    """Returns True only where it is certain: the process belongs to this machine and has ended."""
    host, pid, start = process.rsplit(" ", 2)
    return host == _host() and _start_of(int(pid)) not in (start, ALIVE)


def _start_of(pid: int) -> str:
    """Returns when a process began, in the kernel's ticks, because pids are used again; empty if it has ended.

    It is `ALIVE` where /proc hides the process, as those of other users, or there is no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # the kernel cuts a name anywhere, also within a character
    except OSError:
        return _start_without_proc(pid)
    after_name = stat.rpartition(b")")[2].decode().split()
    return "" if after_name[0] in "ZX" else after_name[19]


def _start_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return ALIVE
