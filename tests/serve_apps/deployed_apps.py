"""deployed_apps: what tests and benches do to policy apps that nothing else does: read every replica, take apps off the list."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ray import serve

from serve_apps.policy.app_list import change, deployed_apps, num_replicas, open_list
from serve_apps.policy.deployment import POLL_S
from serve_apps.policy.replicas import Broadcast


def remove_apps(names: Iterable[str], *, timeout_s: float = 60.0) -> None:
    """Takes apps off the list and waits until they have ended; unknown names are ignored."""
    gone = set(names)
    change(open_list(), lambda apps: {name: entry for name, entry in apps.items() if name not in gone})
    deadline = time.monotonic() + timeout_s
    while left := gone & serve.status().applications.keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"apps {sorted(left)} are still there {timeout_s:g} s after their removal")
        time.sleep(POLL_S)


def replica_statuses(app: str) -> list[dict[str, Any]]:
    """Returns the `Policy.statuses()` of every replica, one per model group; TimeoutError where a replica is missing."""
    answers = Broadcast(app, "statuses").answers(num_replicas(deployed_apps()[app]))
    return [status for statuses in answers for status in statuses]
