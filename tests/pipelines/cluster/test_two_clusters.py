"""One process trains on one local cluster after the other, as a notebook does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

SET_BY_TESTS = ("RAY_ADDRESS", "RAY_worker_niceness")
SCRIPT = """
import os
import ray
from ray import serve
from pipelines.cluster.connect import connect, disconnect
from pipelines.episodes.collector import collectors, end_collectors

for last in (False, True):
    connect()
    print(ray.get(ray.remote(lambda: os.nice(0)).remote()))
    print(len(serve.status().applications))  # what deploying asks first
    serve.start(proxy_location="Disabled")
    workers = collectors(1)
    ray.get(workers[0].stop.remote("no pass", is_cut=True))
    print(ray.get(ray.remote(lambda given: len(given)).remote(workers)))  # handles are sent on, as Ray Data does
    if last:
        end_collectors()
    disconnect()
"""


def test_second_cluster_of_a_process_has_a_serve_and_collectors_of_its_own() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_TESTS}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "0", "1"] * 2  # niceness, applications, collectors
