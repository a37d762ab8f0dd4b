"""freed_memory: whether a waiting trainer keeps the memory that its last job has freed.

The next job takes it again, at no cost where this process kept it. Where the system has it back, the kernel hands it out page by
page: on a virtual machine that was a quarter of a training job.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import psutil

from stores import cgroup

MIN_AVAILABLE_SHARE = 0.5
"""With less of the machine's or container's memory available, a trainer gives back what it does not use."""


def release_if_scarce() -> None:
    """Gives the memory that this process has freed back to the system where other processes may need it."""
    if available_share() < MIN_AVAILABLE_SHARE:
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def available_share() -> float:
    """Returns the share of memory that is available: of the machine, or of a container or job where that has less."""
    machine = psutil.virtual_memory()
    share = cgroup.available_share()
    return min(machine.available / machine.total, 1.0 if share is None else share)
