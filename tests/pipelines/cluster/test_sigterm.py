"""SIGTERM ends a command that is connected to Ray as Ctrl-C does: in words, and not with SIGABRT out of Ray's C++."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

WAITS = """
import time
import ray
from pipelines.cli.options import errors
from pipelines.cluster.connect import connect

with errors(debug=False):
    connect()
    waited_for = ray.remote(lambda: time.sleep(600)).remote()
    print("connected", flush=True)
    ray.get(waited_for)
"""


def test_sigterm_is_an_interrupt_also_while_ray_waits() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "connected\n"
    process.terminate()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.endswith("troupe: interrupted: what is finished is kept, the same command goes on\n"), said
