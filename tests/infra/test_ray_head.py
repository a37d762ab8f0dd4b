"""infra/ray_head.sh with a stand-in for Ray: what the head inherits of whoever starts it."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

SCRIPT = Path(__file__).parents[2] / "infra" / "ray_head.sh"
RAY = """#!/usr/bin/env bash
[ "$1" = start ] || exit 0
ls -l /proc/$$/fd
echo "Ray runtime started"
exec sleep 60
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_a_head_keeps_no_lock_of_its_caller(tmp_path: Path) -> None:
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text(RAY)
    ray.chmod(0o755)
    ports = {"TROUPE_RAY_PORT": free_port(), "TROUPE_RAY_DASHBOARD_PORT": free_port()}
    environment = {**os.environ, **ports, "RAY": str(ray), "TROUPE_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    try:
        with (tmp_path / "of_caller").open("w") as lock:
            subprocess.run([SCRIPT, "up"], env=environment, pass_fds=[lock.fileno()], check=True, capture_output=True)
        held = (tmp_path / "ray" / "head.log").read_text()
    finally:
        subprocess.run([SCRIPT, "down"], env=environment, check=True, capture_output=True)
    assert "/dev/null" in held and "of_caller" not in held
