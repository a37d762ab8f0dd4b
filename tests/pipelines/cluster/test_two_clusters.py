"""One process trains on one local cluster after the other, as a notebook does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

SCRIPT = """
from ray import serve
from pipelines.cluster.connect import connect, disconnect

for _ in range(2):
    connect()
    print(len(serve.status().applications))  # what deploying asks first
    serve.start(proxy_location="Disabled")
    disconnect()
"""


def test_second_cluster_of_a_process_has_a_serve_of_its_own() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]
