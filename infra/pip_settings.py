"""pip_settings: pip's configuration (files and PIP_*) -> the same for uv, as bash lines that fill `flags` and the environment.

uv reads none of pip's settings. The user's settings of uv itself (UV_*) take precedence. With `--one-index` the extra indexes are
left out. Standard library only.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

SECTIONS = (":env:", "install", "global")
"""Sections of pip's configuration; the first that sets an option wins."""


def bash_lines(settings: Mapping[str, str], environ: Mapping[str, str], *, one_index: bool = False) -> list[str]:
    """Returns bash lines for `settings` (option name -> value); white space separates several values, as in pip."""
    lines = []

    def flag(option: str, value: str = "") -> None:
        lines.append(f"flags+=({option} {quote(value)})" if value else f"flags+=({option})")

    def export(name: str, value: str) -> None:
        if name not in environ:
            lines.append(f"export {name}={quote(value)}")

    if (index := settings.get("index-url")) and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(environ):
        flag("--default-index", index)
    extra = settings.get("extra-index-url", "").split()
    if extra and not one_index and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & set(environ):
        for url in extra:
            flag("--index", url)
        # Like pip: of all indexes the file that fits. What it may hold is said by the lock, which has a hash of each.
        if "UV_INDEX_STRATEGY" not in environ:
            flag("--index-strategy", "unsafe-best-match")
    if "UV_FIND_LINKS" not in environ:
        for link in settings.get("find-links", "").split():
            folder = link.removeprefix("file://")
            if "://" in folder or Path(folder).exists():  # pip warns about a missing folder, uv stops
                flag("--find-links", link)
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
    """Returns option name -> value, from the output of `pip config list` and from PIP_*.

    Args:
        listed: that output; empty where pip is missing.
    """
    by_section: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in by_section:
            by_section[section][name] = str(ast.literal_eval(value))
    for variable, value in environ.items():
        if variable.startswith("PIP_") and value:
            by_section[":env:"].setdefault(variable[4:].lower().replace("_", "-"), value)
    merged: dict[str, str] = {}
    for section in reversed(SECTIONS):
        merged |= by_section[section]
    if "default-timeout" in merged:
        merged.setdefault("timeout", merged["default-timeout"])
    return merged


def main() -> None:
    """Prints the lines for the configuration of this user's pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = pip_settings(listed.stdout if listed.returncode == 0 else "", os.environ)
    print("\n".join(bash_lines(settings, os.environ, one_index="--one-index" in sys.argv)))


if __name__ == "__main__":
    main()
