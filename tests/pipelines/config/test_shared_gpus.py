"""Where Ray puts engines and trainers that share GPUs, by the shares that the run config's rule takes. (No GPU is used: Ray counts them.)"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

PLACED = """
import json, ray
ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Placed:
    def gpus(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

kept = [Placed.options(num_gpus=0.6).remote() for _ in range(4)]
engines = ray.get([engine.gpus.remote() for engine in kept])
workers = [Placed.options(num_gpus=0.4).remote() for _ in range(4)]
kept += workers
at_first = ray.get([worker.gpus.remote() for worker in workers])
ray.kill(kept[0])
again = Placed.options(num_gpus=0.6).remote()
print(json.dumps({"engines": engines, "workers": at_first, "again": [*engines[1:], ray.get(again.gpus.remote())]}))
"""


def test_each_gpu_has_one_engine_and_one_worker_also_after_an_engine_died() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=120, check=True, cwd="/"
    )
    for placed in json.loads(done.stdout.splitlines()[-1]).values():
        assert sorted(placed) == [["0"], ["1"], ["2"], ["3"]]
