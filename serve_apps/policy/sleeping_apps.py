"""sleeping_apps: policy apps -> asleep while a trainer has their GPUs, or awake again (`pool: shared`).

Like the version, sleep is part of an app's `user_config`: a replica that starts again finds it there, and a sync, whose
`user_config` has no sleep, wakes the replicas before they take the new version. Every sleep has a deadline, at which the
engines wake by themselves: no killed driver leaves them asleep for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from serve_apps.policy.app_list import Apps, change, num_replicas, open_list, with_user_config
from serve_apps.policy.engine_sleep import ASLEEP_UNTIL, CANNOT_WAKE
from serve_apps.policy.replicas import statuses_if_up
from stores.journal.waiting import waiting

POLL_S = 0.1


def put_to_sleep(apps: Iterable[str], *, until: float, timeout_s: float) -> list[str]:
    """Puts every replica of those of these apps to sleep that are deployed; returns them once all replicas sleep.

    Args: until: a Unix time in seconds at which they wake by themselves. timeout_s: for all apps together.

    Raises TimeoutError where a replica is still awake after `timeout_s`.
    """
    names, deployed = _set(apps, until)
    _wait(names, deployed, until, timeout_s)
    return names


def wake_apps(apps: Iterable[str], *, timeout_s: float) -> None:
    """Wakes every replica of those of these apps that are deployed.

    Args: timeout_s: how long to wait until all of them are awake; 0: not at all, each wakes when its GPU has room.

    Raises TimeoutError, with what is in the way, where a replica is still asleep after `timeout_s`.
    """
    names, deployed = _set(apps, None)
    if timeout_s > 0:
        _wait(names, deployed, None, timeout_s)


def _set(apps: Iterable[str], until: float | None) -> tuple[list[str], Apps]:
    """Writes the sleep into the settings of the apps; returns those that are deployed, and the list."""
    wanted = set(apps)
    try:
        app_list = open_list()
    except ValueError:  # no app was ever deployed on this cluster
        return [], {}
    deployed = change(app_list, lambda now: now | {n: _with_sleep(now[n], until) for n in wanted & now.keys()})
    return sorted(wanted & deployed.keys()), deployed


def _with_sleep(entry: Mapping[str, Any], until: float | None) -> dict[str, Any]:
    settings = {k: v for k, v in entry["deployments"][0]["user_config"].items() if k != ASLEEP_UNTIL}
    return with_user_config(entry, settings | ({ASLEEP_UNTIL: until} if until is not None else {}))


def _wait(names: list[str], deployed: Apps, until: float | None, timeout_s: float) -> None:
    """Returns when every replica of every app reports this sleep."""
    deadline = time.monotonic() + timeout_s
    for name in names:
        while True:
            statuses, num = statuses_if_up(name), num_replicas(deployed[name])
            right = {status["replica_id"] for status in statuses if status[ASLEEP_UNTIL] == until}
            if len(right) >= num:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(_message(name, statuses, until, f"{len(right)} of {num}", timeout_s))
            with waiting(f"replicas of {name} to {'wake' if until is None else 'fall asleep'}"):
                time.sleep(POLL_S)


def _message(app: str, statuses: list[dict[str, Any]], until: float | None, num: str, timeout_s: float) -> str:
    state = "awake" if until is None else "asleep"
    causes = [f"{status['replica_id']}: {status[CANNOT_WAKE]}" for status in statuses if status[CANNOT_WAKE]]
    return "; ".join([f"after {timeout_s:g} s {num} replicas of {app} are {state}", *causes])
