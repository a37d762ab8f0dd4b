"""pip_settings: pip's configuration (files and PIP_*) -> the same for uv, as bash lines that fill `flags` and the environment.

uv reads none of pip's settings. What the user gave uv itself (UV_*) wins and is left alone. Standard library only.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

PLACES = (":env:", "install", "global")
"""Where pip looks, first wins."""


def bash_lines(settings: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Bash lines for `settings` (option name -> value); several values are separated by white space, as pip does."""
    lines = []

    def flag(option: str, value: str = "") -> None:
        lines.append(f"flags+=({option} {quote(value)})" if value else f"flags+=({option})")

    def export(name: str, value: str) -> None:
        if name not in environ:
            lines.append(f"export {name}={quote(value)}")

    if (index := settings.get("index-url")) and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(environ):
        flag("--default-index", index)
    extra = settings.get("extra-index-url", "").split()
    if extra and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & set(environ):
        for url in extra:
            flag("--index", url)
        if "UV_INDEX_STRATEGY" not in environ:  # pip takes the best of all indexes; the lock names exact versions
            flag("--index-strategy", "unsafe-best-match")
    if "UV_FIND_LINKS" not in environ:
        for place in settings.get("find-links", "").split():
            folder = place.removeprefix("file://")
            if "://" in folder or Path(folder).exists():  # pip warns about a missing folder, uv stops
                flag("--find-links", place)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        flag("--no-index")
    for host in settings.get("trusted-host", "").split():
        flag("--allow-insecure-host", host)
    for name, variable in (
        ("cert", "SSL_CERT_FILE"),
        ("client-cert", "SSL_CLIENT_CERT"),
        ("timeout", "UV_HTTP_TIMEOUT"),
        ("retries", "UV_HTTP_RETRIES"),
        ("proxy", "ALL_PROXY"),
    ):
        if value := settings.get(name):
            export(variable, value)
    return lines


def pip_settings(listed: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Option name -> value from `pip config list` output; from PIP_* alone where pip is missing (`listed` empty)."""
    found: dict[str, dict[str, str]] = {place: {} for place in PLACES}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        place, _, name = key.rpartition(".")
        if place in found:
            found[place][name] = str(ast.literal_eval(value))
    for variable, value in environ.items():
        if variable.startswith("PIP_") and value:
            found[":env:"].setdefault(variable[4:].lower().replace("_", "-"), value)
    merged: dict[str, str] = {}
    for place in reversed(PLACES):
        merged |= found[place]
    if "default-timeout" in merged:
        merged.setdefault("timeout", merged["default-timeout"])
    return merged


def main() -> None:
    """Prints the lines for this user's pip."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    print("\n".join(bash_lines(pip_settings(asked.stdout if asked.returncode == 0 else "", os.environ), os.environ)))


if __name__ == "__main__":
    main()
