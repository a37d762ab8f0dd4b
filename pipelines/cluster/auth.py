"""auth: the environment -> the token that a Ray cluster may ask for, under Ray's own rules. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def auth_token() -> str:
    """RAY_AUTH_TOKEN, else what Ray's token file holds; empty where there is neither, or RAY_AUTH_MODE says disabled."""
    if os.environ.get("RAY_AUTH_MODE", "") == "disabled":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token.strip()
    path = token_path()
    return path.read_text().strip() if path.is_file() else ""


def token_path() -> Path:
    """Where Ray looks for the token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
