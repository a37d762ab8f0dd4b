"""infra/ray_head.sh with a stand-in for Ray: what the head inherits of whoever starts it, and what is said where it does not start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.fast

SCRIPT = Path(__file__).parents[2] / "infra" / "ray_head.sh"
RAY = """#!/usr/bin/env bash
[ "$1" = start ] || exit 0
ls -l /proc/$$/fd
[ ! -f "$HOME/raylet" ] || { sleep 60 & echo $! >"$HOME/raylet"; }
echo "Ray runtime started"
exec sleep 60
"""

RAY_THAT_NEVER_STARTS = """#!/usr/bin/env bash
[ "$1" = start ] || exit 0
echo start >>"$HOME/starts"
printf 'Traceback (most recent call last):\\n  File "ray", line 1, in start\\n'
echo "Exception: the node timed out during startup"
exit 1
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def environment_of(folder: Path, ray_script: str) -> dict[str, str]:
    ray = folder / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text(ray_script)
    ray.chmod(0o755)
    ports = {"TROUPE_RAY_PORT": free_port(), "TROUPE_RAY_DASHBOARD_PORT": free_port()}
    return {**os.environ, **ports, "RAY": str(ray), "TROUPE_CACHE": str(folder), "HOME": str(folder)}


def test_a_head_keeps_no_lock_of_its_caller(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, RAY)
    try:
        with (tmp_path / "of_caller").open("w") as lock:
            subprocess.run([SCRIPT, "up"], env=environment, pass_fds=[lock.fileno()], check=True, capture_output=True)
        held = (tmp_path / "ray" / "head.log").read_text()
    finally:
        subprocess.run([SCRIPT, "down"], env=environment, check=True, capture_output=True)
    assert "/dev/null" in held and "of_caller" not in held


def test_what_a_dead_head_left_running_is_ended_before_another_starts(tmp_path: Path) -> None:
    """A raylet outlives its GCS, and the first process of the head with it: the ports stayed taken."""
    environment = environment_of(tmp_path, RAY)
    (tmp_path / "raylet").touch()

    def call(what: str) -> str:
        return subprocess.run([SCRIPT, what], env=environment, check=True, capture_output=True, text=True).stdout

    try:
        for begin_again in ("up", "down"):
            call("up")
            head, raylet = (
                psutil.Process(int((tmp_path / name).read_text().split()[0])) for name in ("ray/head", "raylet")
            )
            head.send_signal(signal.SIGKILL)
            head.wait(5)
            assert raylet.is_running()
            assert f"ended what was left of the Ray head (process {head.pid})" in call(begin_again)
            assert not raylet.is_running() or raylet.wait(5) is None
    finally:
        call("down")


def test_a_head_that_never_starts_ends_in_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, RAY_THAT_NEVER_STARTS)
    done = subprocess.run([SCRIPT, "up"], env=environment, check=False, capture_output=True, text=True)
    said, last_line = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert said.startswith("ray_head: Ray did not start") and said.endswith("End some, then repeat.")
    assert "the node timed out during startup;" in last_line and last_line.endswith("ray/head.log")
    assert (tmp_path / "starts").read_text().split() == ["start"] * 2, "Ray gives up where the machine stalls"
