"""callers: the head of a request -> the teams that it may reach, each with the key by which that team knows its caller.

    Host, Origin, Authorization ──> the door of each team ──> {team: key} | 401, 403

Teams that share a port have keys, host names and origins of their own. What opens one door opens no other, and a request to which no
door opens learns nothing of the teams behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from serve_apps.config import LOOPBACK, GatewayTeamConfig
from serve_apps.gateway.traffic.api_keys import ANYONE, ApiKey, KeyRing, key_header
from serve_apps.openai_api.protocol import ApiError

NO_TEAM = "no team is deployed"
TELLING = ("origin_not_allowed", "expired_api_key", "invalid_api_key", "missing_api_key", "host_not_allowed")
"""Codes of refusals, those first which say most to a caller that several teams refuse."""


class Door:
    """What lets a request in to one team."""

    def __init__(self, settings: GatewayTeamConfig, keys: KeyRing, *, host: str) -> None:
        """Args: host: on which the gateway listens."""
        self.keys, self.origins = keys, settings.allowed_origins
        self._hosts = None if settings.keys_file else {*LOOPBACK, *map(str.lower, (host, *settings.allowed_hosts))}
        """The hosts that requests may name; None: any, since each needs a key."""

    def open(self, headers: Mapping[str, str], *, of_page: str | None) -> ApiKey:
        """Returns the key of the caller; ApiError 401 or 403.

        Args: of_page: the origin of a page that may call some team here; None: no such page has sent the request.
        """
        host = headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            # A page of another site that gives its own name this machine's address is the caller's browser, not the caller.
            raise ApiError(
                403,
                f"this gateway has no keys and does not answer to the name {host[:100]!r}: ask for localhost, add the name to "
                "gateway.allowed_hosts, or set gateway.keys_file",
                code="host_not_allowed",
            )
        key = self.keys.find(key_header(headers))
        if of_page is not None and not self.lets_in(of_page):
            raise ApiError(
                403, f"pages of {of_page[:100]!r} may not call: see gateway.allowed_origins", code="origin_not_allowed"
            )
        return key

    def lets_in(self, origin: str) -> bool:
        """Whether pages of an origin may call the team."""
        return origin in self.origins or "*" in self.origins


class Callers:
    """The doors of all teams of one gateway replica."""

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._rings: Mapping[str, KeyRing] = {}
        """By file: teams that have one file have the same callers."""
        self._doors: Mapping[str, Door] = {}

    def admit_to(self, teams: Mapping[str, GatewayTeamConfig]) -> None:
        """Sets the doors of all teams; ValueError where keys cannot be read, and all doors stay as they are.

        The first time such a team stays closed until they can be read, so that the others are not kept from their callers.
        """
        rings = {
            file: self._rings.get(file) or KeyRing(Path(file) if file else None, may_be_unreadable=not self._doors)
            for file in {settings.keys_file for settings in teams.values()}
        }
        self._doors = {
            name: Door(settings, rings[settings.keys_file], host=self._host) for name, settings in teams.items()
        }
        self._rings = rings

    def keys(self, headers: Mapping[str, str]) -> dict[str, ApiKey]:
        """Returns the teams whose doors open, each with the caller's key there; ApiError 401 or 403 where none does.

        ApiError 503 where there is no team.
        """
        if not self._doors:
            raise ApiError(503, NO_TEAM, code="not_ready")
        of_page = self._page(headers)
        opened, refusals = dict[str, ApiKey](), list[ApiError]()
        for name, door in self._doors.items():
            try:
                opened[name] = door.open(headers, of_page=of_page)
            except ApiError as refusal:
                refusals.append(refusal)
        if not opened:
            raise _most_telling(refusals)
        # The caller's own key first, where it has one: what concerns no team in particular is said of it, and counts towards its rate.
        return dict(sorted(opened.items(), key=lambda item: item[1] is ANYONE))

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes with a key of some team."""
        return self.has_keys and self.lacks_key(headers) is None

    def lacks_key(self, headers: Mapping[str, str]) -> ApiError | None:
        """Returns why no team knows a caller by a key, where some have keys: what it asks for may be behind such a door."""
        refusals = list[ApiError]()
        for ring in self._rings.values():
            try:
                if ring.find(key_header(headers)) is not ANYONE:
                    return None
            except ApiError as refusal:
                refusals.append(refusal)
        return _most_telling(refusals) if refusals else None

    def answers_to(self, headers: Mapping[str, str]) -> ApiError | None:
        """Returns why nothing at all is answered to the host that a request names; None where something may be."""
        if self._doors and not self.has_keys:
            try:
                self.keys({"host": headers.get("host", "")})
            except ApiError as refusal:
                return refusal
        return None

    def let_in(self, origin: str) -> bool:
        """Whether pages of an origin may call any team."""
        return any(door.lets_in(origin) for door in self._doors.values())

    @property
    def has_keys(self) -> bool:
        """Whether some team has keys."""
        return any(ring.has_file for ring in self._rings.values())

    @property
    def num(self) -> int:
        """The number of keys that may call models, and one for all callers without a key."""
        return sum(ring.num_callers for ring in self._rings.values())

    def refresh(self) -> dict[str, str]:
        """Reads files of keys that have changed; returns by team why one could not be loaded."""
        for ring in self._rings.values():
            ring.reload_if_changed()
        return {name: door.keys.fault for name, door in self._doors.items() if door.keys.fault}

    def _page(self, headers: Mapping[str, str]) -> str | None:
        """A browser asks once for all paths of a port whether a page may call (CORS): each door then decides for itself."""
        origin, host = headers.get("origin"), headers.get("host", "")
        is_own = origin in (f"http://{host}", f"https://{host}")
        return None if origin is None or is_own or not self.let_in(origin) else origin


def _most_telling(refusals: list[ApiError]) -> ApiError:
    return min(refusals, key=lambda refusal: TELLING.index(refusal.code))


def _name_of(host: str) -> str:
    """Returns the name in a `Host` header, without its port; empty where it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
