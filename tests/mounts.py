"""mounts: commands that see a folder as on a read-only mount, or on a full disk, in a mount namespace of their own.

Who is not root gets a user namespace as well. Where the kernel or a container forbids both, the test is skipped.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@cache
def is_allowed() -> bool:
    """Whether this machine lets us make mount namespaces."""
    try:
        return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def on_read_only_mount(folder: Path, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees `folder` mounted read-only; everybody else goes on writing to it."""
    at = shlex.quote(str(folder))
    return _run(f"mount --bind {at} {at} && mount -o remount,ro,bind {at}", command)


def on_full_disk(
    folder: Path, command: Sequence[str | Path], *, spare_kib: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees a copy of `folder` in its place, on a file system with this much room left."""
    at = shlex.quote(str(folder))
    size = f"$(( $(du -sk {at} | cut -f1) + {1024 + spare_kib} ))k"
    keep = f"head -c {spare_kib * 1024} /dev/zero > $T/spare"
    fill = "{ cat /dev/zero > $T/filling; } 2> /dev/null || true"
    copy = f"mount -t tmpfs -o size={size} none $T && cp -a {at}/. $T/ && {keep} && {fill}; rm $T/spare"
    return _run(f"export T=$(mktemp -d) && {copy} && mount --bind $T {at}", command)


def in_small_disk(
    folder: Path, command: Sequence[str | Path], *, size_mib: int, cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees an empty file system of this size at `folder`; what it leaves there is gone afterwards."""
    mount = f"mount -t tmpfs -o size={size_mib}m none {shlex.quote(str(folder))}"
    return _run(mount, command, cwd=cwd, timeout_s=timeout_s)


def _run(
    mounts: str, command: Sequence[str | Path], *, cwd: Path | None = None, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    if not is_allowed():
        pytest.skip("mount namespaces are not allowed here")
    script = f"{{ {mounts}; }} && exec {shlex.join(map(str, command))}"
    return subprocess.run([*NAMESPACE, "sh", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
