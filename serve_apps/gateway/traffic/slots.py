"""slots: a request and the team that answers it -> a slot of the gateway, counted as in flight on that team until it is released."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from serve_apps.gateway.traffic.admission import Admission
from serve_apps.gateway.traffic.api_keys import Holder
from serve_apps.gateway.traffic.teams import ServedTeam


class InFlight:
    """Counts the requests that each set of policy apps is answering. It lives in one event loop.

    A set on which nothing is in flight may be loaded with another team.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        """By team, set and version."""

    def add(self, team: ServedTeam, num: int) -> None:
        """Adds `num` requests on this team; -1 where one has ended."""
        self._counts[team.name, team.set_name, team.version] += num

    def rows(self) -> list[dict[str, Any]]:
        """Returns the requests in flight as {"team", "set_name", "team_version", "num"}."""
        return [
            {"team": name, "set_name": set_name, "team_version": version, "num": num}
            for (name, set_name, version), num in self._counts.items()
            if num
        ]


class Slot:
    """A place among the requests in flight, and the team that answers the request that has it, until `release`."""

    def __init__(self, team: ServedTeam, *, key: Holder, admission: Admission, in_flight: InFlight) -> None:
        """The place in `admission` is already taken. Args: key: the holder of the API key that took it."""
        self.team, self._key = team, key
        self._admission, self._in_flight = admission, in_flight
        self._began = time.perf_counter()
        self._is_released = False
        in_flight.add(team, 1)

    @property
    def seconds(self) -> float:
        """Seconds since the request got the slot."""
        return time.perf_counter() - self._began

    def release(self) -> None:
        """Gives the slot back; further calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self._in_flight.add(self.team, -1)
            self._admission.leave(self._key)

    def __enter__(self) -> ServedTeam:
        return self.team

    def __exit__(self, *_: object) -> None:
        self.release()
