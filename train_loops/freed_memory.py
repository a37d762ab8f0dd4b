"""freed_memory: whether a waiting trainer keeps the memory that its last job has freed.

The next job takes it again, at no cost where this process kept it. Where the system has it back, the kernel hands it out page by
page: on a virtual machine that was a quarter of a training job.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MIN_AVAILABLE_SHARE = 0.5
"""With less of the machine's memory available, a trainer gives back what it does not use."""


def release_if_scarce() -> None:
    """Gives the memory that this process has freed back to the system where other processes may need it."""
    if available_share() < MIN_AVAILABLE_SHARE:
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def available_share(cgroup: Path = CGROUP) -> float:
    """Returns the share of memory that is available: of the machine, or of its container where that has less."""
    machine = psutil.virtual_memory()
    shares = [machine.available / machine.total]
    with suppress(OSError, ValueError):  # no cgroup of version 2, or "max"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _file_cache(cgroup)
        shares.append(1 - used / limit)
    return min(shares)


def _file_cache(cgroup: Path) -> int:
    """Returns the bytes of cached files, which `memory.current` counts and the kernel drops where memory is short."""
    counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(counts["inactive_file"]) + int(counts["active_file"])
