"""A disk that fills up in the middle of an iteration: which file it was is said, and once there is room nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mounts import in_small_disk

from pipelines.run.run import Run
from tests.e2e.local_runs import config_in, distance, keys

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SCENE = "tests.e2e.full_disk_scene"


@pytest.mark.parametrize("stage", ["collect", "train"])
def test_a_run_goes_on_as_the_undisturbed_one_once_there_is_room(stage: str, undisturbed: Run, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    done = in_small_disk(root, [sys.executable, "-m", SCENE, root, stage], size_mib=400, cwd=ROOT, timeout_s=1200)
    assert done.returncode == 0, _logs(done, tmp_path)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["first"] == 1 and told["second"] == 0, _logs(done, tmp_path)
    (message,) = told["said"]
    assert f"disk full while writing {root}/" in message and "the same command goes on" in message
    root.rmdir()
    root.with_name("runs-after").rename(root)
    run = Run(config_in(root))
    for iteration in (1, 2):
        assert keys(run, iteration) == keys(undisturbed, iteration), "no episode lost, none twice"
    assert distance(run, undisturbed) < 1e-3


def _logs(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    logs = [path.read_text()[-3000:] for path in sorted(folder.glob("*.log"))]
    return "\n----\n".join([done.stderr[-3000:], *logs])
