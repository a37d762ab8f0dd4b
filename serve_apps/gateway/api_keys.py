"""api_keys: a caller's key -> who it is and what it may do. Keys are kept as hashes, in a file that may change at any time.

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
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from serve_apps.openai_api.protocol import ApiError

Scope = Literal["call", "feedback", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "troupe-"
LOOK_S = 1.0
"""How often the file is looked at."""


class ApiKey(BaseModel):
    """One caller."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = ("call",)
    expires_at: float | None = None
    """Unix seconds; null: never."""
    requests_per_minute: int | None = Field(None, ge=1)


KEYS = TypeAdapter(list[ApiKey])
ANYONE = ApiKey(name="anyone", sha256="0" * 64, scopes=SCOPES)
"""Where there are no keys: a gateway that only this machine reaches."""


def make_key(
    name: str, *, scopes: tuple[Scope, ...], expires_at: float | None, requests_per_minute: int | None
) -> tuple[str, ApiKey]:
    """A fresh secret and what is kept of it."""
    secret = PREFIX + secrets.token_urlsafe(32)
    kept = ApiKey(
        name=name,
        sha256=sha256(secret.encode()).hexdigest(),
        scopes=scopes,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
    )
    return secret, kept


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file; ValueError names the file and the first fault."""
    try:
        return KEYS.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"gateway.keys_file {path}: {error.strerror}: make a key with `troupe key`") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}." for part in first["loc"])
        raise ValueError(f"gateway.keys_file {path}: {place}: {first['msg']}") from None


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    """Replaces the file at once, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.touch(mode=0o600)
    scratch.write_bytes(json.dumps([json.loads(k.model_dump_json()) for k in keys], indent=1).encode())
    scratch.replace(path)


class KeyRing:
    """The keys in force. A file that is broken while the gateway runs leaves the last good ones in force."""

    def __init__(self, path: Path | None) -> None:
        """ValueError where the file cannot be read; None: everybody may do everything."""
        self._path = path
        self._by_hash: Mapping[str, ApiKey] = {}
        self._stamp, self._looked_at = (0, 0, 0), 0.0
        self.fault = ""
        """Why the file's last change is not in force."""
        if path is not None:
            self._load(path)

    def check(self, header: str | None, scope: Scope) -> ApiKey:
        """Who calls, by the `Authorization` header; ApiError 401 or 403."""
        if self._path is None:
            return ANYONE
        self._look(self._path)
        kind, _, secret = (header or "").partition(" ")
        if kind.lower() != "bearer" or not secret:
            raise ApiError(401, "no API key: send `Authorization: Bearer KEY`", code="missing_api_key")
        digest = sha256(secret.strip().encode()).hexdigest()
        found = next((key for known, key in self._by_hash.items() if hmac.compare_digest(known, digest)), None)
        if found is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        if found.expires_at is not None and found.expires_at <= time.time():
            raise ApiError(401, f"API key {found.name!r} has expired: ask for a new one", code="expired_api_key")
        if scope not in found.scopes:
            raise ApiError(
                403,
                f"API key {found.name!r} has the scopes {', '.join(found.scopes)}; this needs {scope!r}",
                code="missing_scope",
            )
        return found

    def _look(self, path: Path) -> None:
        if time.monotonic() < self._looked_at + LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            if _stamp(path) != self._stamp:
                self._load(path)
        except (ValueError, OSError) as error:
            self.fault = str(error)

    def _load(self, path: Path) -> None:
        stamp = _stamp(path)  # before it is read, so that a change meanwhile is seen at the next look
        keys = read_keys(path)
        self._by_hash = {key.sha256: key for key in keys}
        self._stamp, self._looked_at, self.fault = stamp, time.monotonic(), ""


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes when the file does; its time alone need not: it may be that of a copy, or of the same tick."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size
