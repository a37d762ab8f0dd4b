"""auth: the environment -> the token that a Ray cluster may ask for, under Ray's own rules. Standard library only."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

OTHERS = 0o077
"""The permissions of everybody but the owner."""


def auth_mode() -> str:
    """RAY_AUTH_MODE, which Ray reads in any case; empty where it is not set."""
    return os.environ.get("RAY_AUTH_MODE", "").lower()


def auth_token() -> str:
    """RAY_AUTH_TOKEN, else what Ray's token file holds; empty where there is neither, or RAY_AUTH_MODE says disabled."""
    if auth_mode() == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token.strip()
    path = token_path()
    return path.read_text().strip() if path.is_file() else ""


def token_path() -> Path:
    """Where Ray looks for the token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _default_path())


def keep_token_private() -> None:
    """Makes the token that a new local head uses, readable by its owner only: Ray would let every user of the machine read it.

    A file that is there keeps its token and loses the permissions of others. A token from elsewhere (RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH) is left alone.
    """
    if not auth_token() and auth_mode() != "disabled":
        _default_path().parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process was faster; Ray reads what that one wrote
            descriptor = os.open(_default_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
    path = _default_path()
    if path.is_file() and path.stat().st_uid == os.geteuid() and path.stat().st_mode & OTHERS:
        path.chmod(0o600)


def _default_path() -> Path:
    return Path.home() / ".ray" / "auth_token"
