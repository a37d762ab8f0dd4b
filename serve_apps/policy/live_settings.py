"""live_settings: policy apps -> asleep, awake, or of low priority, without a restart.

Like the version, sleep and priority are part of an app's `user_config`: a replica that starts again finds them there. Engines sleep
while a trainer has their GPUs (`pool: shared`); a sync, whose `user_config` has no sleep, wakes them before they take the new version.
Every sleep has a deadline, at which the engines wake by themselves: no killed driver leaves them asleep for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from serve_apps.policy.app_list import Apps, change, num_replicas, open_list, with_user_config
from serve_apps.policy.engine_sleep import ASLEEP_UNTIL, CANNOT_WAKE
from serve_apps.policy.priority import LOW_PRIORITY
from serve_apps.policy.replicas import statuses_if_up
from stores.journal.waiting import waiting

POLL_S = 0.1


def put_to_sleep(apps: Iterable[str], *, until: float, timeout_s: float) -> list[str]:
    """Puts every replica of those of these apps to sleep that are deployed; returns them once all replicas sleep.

    Args: until: a Unix time in seconds at which they wake by themselves. timeout_s: for all apps together.

    Raises TimeoutError where a replica is still awake after `timeout_s`.
    """
    names, deployed = _set_where_deployed(apps, ASLEEP_UNTIL, until)
    _wait(names, deployed, ASLEEP_UNTIL, until, timeout_s, "asleep")
    return names


def wake_apps(apps: Iterable[str], *, timeout_s: float) -> None:
    """Wakes every replica of those of these apps that are deployed.

    Args: timeout_s: how long to wait until all of them are awake; 0: not at all, each wakes when its GPU has room.

    Raises TimeoutError, with what is in the way, where a replica is still asleep after `timeout_s`.
    """
    names, deployed = _set_where_deployed(apps, ASLEEP_UNTIL, None)
    if timeout_s > 0:
        _wait(names, deployed, ASLEEP_UNTIL, None, timeout_s, "awake")


def set_low_priority(apps: Iterable[str], low_priority: bool, *, timeout_s: float) -> None:
    """Gives every replica of these apps low priority for the CPU, or normal priority again (see priority.py).

    Raises KeyError for an app that is not deployed, TimeoutError where a replica has not taken it in `timeout_s`.
    """
    names = sorted(set(apps))
    value = low_priority or None
    deployed = change(
        open_list(), lambda now: now | {name: with_setting(now[name], LOW_PRIORITY, value) for name in names}
    )
    _wait(names, deployed, LOW_PRIORITY, low_priority, timeout_s, f"of {'low' if low_priority else 'normal'} priority")


def with_setting(entry: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns an app's entry with `key` set in its `user_config`, or where `value` is None without it."""
    settings = {name: now for name, now in entry["deployments"][0]["user_config"].items() if name != key}
    return with_user_config(entry, settings if value is None else settings | {key: value})


def _set_where_deployed(apps: Iterable[str], key: str, value: Any) -> tuple[list[str], Apps]:
    """Writes a setting of those of these apps that are deployed; returns them, and the list."""
    wanted = set(apps)
    try:
        app_list = open_list()
    except ValueError:  # no app was ever deployed on this cluster
        return [], {}
    deployed = change(app_list, lambda now: now | {n: with_setting(now[n], key, value) for n in wanted & now.keys()})
    return sorted(wanted & deployed.keys()), deployed


def _wait(names: list[str], deployed: Apps, key: str, value: Any, timeout_s: float, state: str) -> None:
    """Returns when every replica of every app reports this value; TimeoutError, with what is in the way, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for name in names:
        while True:
            statuses, num = statuses_if_up(name), num_replicas(deployed[name])
            right = {status["replica_id"] for status in statuses if status[key] == value}
            if len(right) >= num:
                break
            if time.monotonic() > deadline:
                causes = [
                    f"{status['replica_id']}: {status[CANNOT_WAKE]}" for status in statuses if status[CANNOT_WAKE]
                ]
                begin = f"after {timeout_s:g} s {len(right)} of {num} replicas of {name} are {state}"
                raise TimeoutError("; ".join([begin, *causes]))
            with waiting(f"replicas of {name} to be {state}"):
                time.sleep(POLL_S)
