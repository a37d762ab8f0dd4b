"""priority: a process of shadows -> the CPU only when nobody else wants it (SCHED_IDLE), or as any other process.

A shadow must not slow those who answer people. Its processes stand back as a whole: what an engine starts inherits it. For
a policy app the wish is part of its `user_config`, so that a replica that Serve starts again stands back, too. Whether a process
may come forward again is for the kernel to say (root may): where it refuses, the replica ends, and the one that Serve starts
in its place has the usual priority.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

LOW_PRIORITY = "low_priority"
"""In an app's `user_config`, and in the status of a replica."""


def set_process_priority(low_priority: bool) -> None:
    """Of this process, what it has started, and all of their threads. PermissionError where it may not come forward."""
    policy = os.SCHED_IDLE if low_priority else os.SCHED_OTHER
    is_changed = True
    while is_changed:  # a thread that was started meanwhile may have the priority of before
        is_changed = False
        for thread in _threads():
            try:
                if os.sched_getscheduler(thread) != policy:
                    os.sched_setscheduler(thread, policy, os.sched_param(0))
                    is_changed = True
            except ProcessLookupError:  # it has ended
                continue


def warn_if_others_are_nice() -> None:
    """A process that stands back has weight 3 for the kernel, one of Ray's usual niceness 15 has 36, others have 1024."""
    if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
        logger.warning(
            "this Ray gives its processes niceness %d, so that those who answer people hardly come before a shadow: "
            "start its nodes with RAY_worker_niceness=0 in their environment",
            niceness,
        )


def has_low_priority() -> bool:
    """Whether this process has the CPU only when nobody else wants it."""
    return os.sched_getscheduler(0) == os.SCHED_IDLE


def _threads() -> Iterator[int]:
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            yield from [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        except FileNotFoundError:  # it has ended
            continue
