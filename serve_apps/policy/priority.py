"""priority: a process of shadow traffic -> low priority for the CPU (SCHED_IDLE), or normal priority again (SCHED_OTHER).

Shadow traffic must not slow production traffic: its processes run only when no other process wants the CPU. What an engine
starts inherits the priority. For a policy app it is part of the `user_config`, so that a replica that Serve starts again has
it, too. The kernel decides whether a process may return to normal priority (root may): where it refuses, the replica ends,
and Serve starts one with normal priority in its place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

LOW_PRIORITY = "low_priority"
"""The key in an app's `user_config` and in the status of a replica."""


def set_process_priority(low_priority: bool) -> None:
    """Sets the priority of this process, of what it has started, and of all their threads.

    Raises PermissionError where this process may not return to normal priority.
    """
    policy = os.SCHED_IDLE if low_priority else os.SCHED_OTHER
    is_changed = True
    while is_changed:  # a thread that was started meanwhile may have the old priority
        is_changed = False
        for thread in _threads():
            try:
                if os.sched_getscheduler(thread) != policy:
                    os.sched_setscheduler(thread, policy, os.sched_param(0))
                    is_changed = True
            except ProcessLookupError:  # it has ended
                continue


def warn_if_others_are_nice() -> None:
    """Warns where Ray's processes are nice, which leaves low priority hardly any lower.

    For the kernel a process of low priority has weight 3, one of Ray's usual niceness 15 has 36, others have 1024.
    """
    if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
        logger.warning(
            "this Ray gives its processes niceness %d, so that production traffic hardly comes before shadow traffic: "
            "start its nodes with RAY_worker_niceness=0 in their environment",
            niceness,
        )


def has_low_priority() -> bool:
    """Returns whether this process has low priority."""
    return os.sched_getscheduler(0) == os.SCHED_IDLE


def _threads() -> Iterator[int]:
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            yield from [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        except FileNotFoundError:  # it has ended
            continue
