"""callers: the head of a request -> the teams that it may reach, each with the key by which that team knows its caller.

    Host, Origin, Authorization ──> the door of each team ──> {team: key} | 401, 403

Teams that share a port have keys, host names and origins of their own. What opens one door opens no other, and a request to which no
door opens learns nothing of the teams behind them. Keys are stored as hashes, in a file that may change at any time:

    [{"name": "web", "sha256": "...", "scopes": ["call"], "expires_at": 1790000000, "requests_per_minute": 600}]
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from serve_apps.config import LOOPBACK, GatewayTeamConfig
from serve_apps.openai_api.protocol import ApiError

Scope = Literal["call", "feedback", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "troupe-"
CHECK_INTERVAL_S = 1.0
"""How often the file is checked for changes."""

NO_TEAM = "no team is deployed"
TELLING = ("origin_not_allowed", "expired_api_key", "invalid_api_key", "missing_api_key", "host_not_allowed")
"""Codes of refusals, those first which say most to a caller that several teams refuse."""


class Holder(NamedTuple):
    """Who sends a key. Keys of one name in two files have two holders."""

    file: str
    name: str


class ApiKey(BaseModel):
    """What is stored about the key of one caller."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = ("call",)
    expires_at: float | None = Field(None, allow_inf_nan=False)
    """Unix seconds; null: it never expires."""
    requests_per_minute: int | None = Field(None, ge=1)
    _file: str = PrivateAttr("")

    @property
    def holder(self) -> Holder:
        """Who sends the key."""
        return Holder(self._file, self.name)

    @property
    def has_expired(self) -> bool:
        """Whether it is not valid any more."""
        return self.expires_at is not None and self.expires_at <= time.time()


KEYS = TypeAdapter(list[ApiKey])
ANYONE = ApiKey(name="anyone", sha256="0" * 64, scopes=SCOPES)
"""The key of every request where there is no file of keys: a gateway that only this machine reaches."""


def make_key(
    name: str,
    *,
    scopes: tuple[Scope, ...] = ("call",),
    expires_at: float | None = None,
    requests_per_minute: int | None = None,
) -> tuple[str, ApiKey]:
    """Makes a new secret; returns it with the entry to store, which has only its hash."""
    secret = PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(
        name=name,
        sha256=sha256(secret.encode()).hexdigest(),
        scopes=scopes,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
    )
    return secret, key


def read_keys(path: Path) -> list[ApiKey]:
    """Reads the keys of a file; ValueError names the file and the first fault."""
    try:
        content = path.read_bytes()
        keys = KEYS.validate_json(content)
    except OSError as error:
        raise ValueError(f"gateway.keys_file {path}: {error.strerror}: make a key with `troupe key`") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"{part}." for part in first["loc"])
        raise ValueError(f"gateway.keys_file {path}: {field}: {first['msg']}") from None
    try:
        json.loads(content, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"gateway.keys_file {path}: {error}") from None
    return keys


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a key; ValueError for one that stands twice, of which JSON would take the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice!r} stands twice in the key {fields.get('name', '')!r}: keep one of them")
    return fields


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    """Replaces the file in one step, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)  # one that a killed write left behind may have another mode
    scratch.touch(mode=0o600, exist_ok=False)
    scratch.write_bytes(json.dumps([json.loads(k.model_dump_json()) for k in keys], indent=1).encode())
    scratch.replace(path)


def key_header(headers: Mapping[str, str]) -> str | None:
    """Returns what a request sends as `Authorization`; Anthropic's clients send their key as `x-api-key`."""
    own = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {own}" if own else None)


def with_scope(keys: Mapping[str, ApiKey], *scopes: Scope) -> dict[str, ApiKey]:
    """Returns the keys that have one of the scopes; ApiError 403 where none has."""
    allowed = {name: key for name, key in keys.items() if set(scopes) & set(key.scopes)}
    if not allowed:
        key, needed = next(iter(keys.values())), " or ".join(map(repr, scopes))
        raise ApiError(
            403,
            f"API key {key.name!r} has the scopes {', '.join(key.scopes)}; this needs {needed}",
            code="missing_scope",
        )
    return allowed


class KeyRing:
    """The keys of one file that are valid now. If the file is broken while the gateway runs, the last good keys stay valid."""

    def __init__(self, path: Path | None, *, may_be_unreadable: bool = False) -> None:
        """Reads the file; without a path every caller may do everything.

        Args: may_be_unreadable: no key is valid until the file can be read, instead of a ValueError.
        """
        self._path = path
        self._by_hash: Mapping[str, ApiKey] = {}
        self._stamp: tuple[int, int, int] | None = None
        """Of the file as it was loaded; None: never."""
        self._checked_at = 0.0
        self.fault = ""
        """Why the file's last change could not be loaded; empty where it was."""
        if path is not None:
            try:
                self._load(path)
            except ValueError as error:
                if not may_be_unreadable:
                    raise
                self.fault = str(error)

    @property
    def has_file(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    @property
    def num_callers(self) -> int:
        """The number of valid keys that may call models; without a file all callers are one."""
        if self._path is None:
            return 1
        return sum("call" in key.scopes and not key.has_expired for key in self._by_hash.values())

    def find(self, header: str | None) -> ApiKey:
        """Returns the key that the `Authorization` header names, whatever it may do; ApiError 401."""
        if self._path is None:
            return ANYONE
        if time.monotonic() >= self._checked_at + CHECK_INTERVAL_S:
            self.reload_if_changed()
        kind, _, secret = (header or "").partition(" ")
        if kind.lower() != "bearer" or not secret:
            raise ApiError(401, "no API key: send `Authorization: Bearer KEY`", code="missing_api_key")
        digest = sha256(secret.strip().encode()).hexdigest()
        # Compared in constant time, so that the time of an answer tells nothing about the stored hashes.
        key = next((key for known, key in self._by_hash.items() if hmac.compare_digest(known, digest)), None)
        if key is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        if key.has_expired:
            raise ApiError(401, f"API key {key.name!r} has expired: ask for a new one", code="expired_api_key")
        return key

    def reload_if_changed(self) -> None:
        """Reads the file again where it has changed."""
        if self._path is None:
            return
        self._checked_at = time.monotonic()
        try:
            if _stamp(self._path) != self._stamp:
                self._load(self._path)
        except ValueError as error:
            self.fault = str(error)
        else:
            self.fault = ""

    def _load(self, path: Path) -> None:
        stamp = _stamp(path)  # before the file is read, so that a change meanwhile is seen at the next check
        keys = read_keys(path)
        for key in keys:
            key._file = str(path)
        self._by_hash = {key.sha256: key for key in keys}
        self._stamp, self._checked_at = stamp, time.monotonic()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Returns modification time, inode and size, one of which changes with the file.

    The time alone may stay: a copy may have kept it, or two writes fall into one tick of the clock. Zeros where the file cannot be
    looked at, and `read_keys` says why.
    """
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


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
