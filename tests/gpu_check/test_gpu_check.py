"""The check of GPUs as far as it goes without one: nvidia-smi's answers, parts, settings, the table, the end without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from tests.gpu_check.memory import Gpu, gpus, used_gib, watched
from tests.gpu_check.parts import PARTS, changes_of, left_out
from tests.gpu_check.rows import Outcome, Row, markdown

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "infra" / "runs" / "demo.yaml"
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=name,memory.total) echo "NVIDIA H100, 80GB HBM3, 81920"; echo "NVIDIA L4, 23040" ;;
  --query-gpu=memory.used) echo 1024; echo 512 ;;
  *) exit 2 ;;
esac
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("two_gpus")
def test_the_gpus_and_their_used_memory_are_read_from_nvidia_smi() -> None:
    assert gpus() == [Gpu(name="NVIDIA H100, 80GB HBM3", total_gib=80), Gpu(name="NVIDIA L4", total_gib=22.5)]
    assert used_gib() == [1.0, 0.5]


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (gpus(), used_gib()) == ([], [])
    with watched() as used:
        pass
    assert (used.peak_gib, used.last_gib) == (None, None)


def test_the_peak_is_that_of_the_fullest_gpu_and_the_last_reading_comes_after_the_block() -> None:
    readings = iter([[1.0, 2.0], [1.0, 7.0]])
    is_read = threading.Event()

    def read() -> list[float]:
        found = next(readings, [3.0, 2.5])
        if found[1] == 7.0:
            is_read.set()
        return found

    with watched(read) as used:
        assert is_read.wait(10)
    assert (used.peak_gib, used.last_gib) == (7.0, 3.0)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_the_run_of_every_part_is_a_valid_config_that_asks_for_the_gpus_it_says(name: str, on_gpu: bool) -> None:
    changes = changes_of(PARTS[name], model="a-model" if on_gpu else "", on_gpu=on_gpu, num_cores=8)
    config = load_config(DEMO, {"run": name, **changes})
    [*groups] = config.model_groups
    serve, train = config.serve_config(groups[0]), config.train_config(groups[0])
    assert config.pool == ("shared" if "shared" in PARTS[name].settings.values() else "separate")
    reserved = max(1, len(config.bases)) * serve.gpus + len(groups) * train.num_workers * train.gpus_per_worker
    assert reserved <= (PARTS[name].num_gpus if on_gpu else 0)
    assert (serve.dtype, reserved > 0) == (("bfloat16", True) if on_gpu else ("float32", False))


def test_a_part_without_gpus_enough_is_left_out_with_the_reason() -> None:
    assert left_out(PARTS["shared"], 1) == ""
    assert left_out(PARTS["tensor-parallel"], 1) == "needs 2 GPUs, there is 1"
    assert left_out(PARTS["two-workers"], 2) == "needs 3 GPUs, there are 2"


def test_the_table_has_a_row_per_stage_and_the_verdict_of_every_part() -> None:
    rows = [Row(stage="train 1", seconds=3.21, peak_gib=9.96, last_gib=1.0, seen="a|b\nc")]
    outcomes = {
        "shared": Outcome(verdict="failed", reason="exit code 1", rows=rows),
        "separate": Outcome(verdict="left out", reason="needs 2 GPUs, there is 1"),
    }
    assert markdown(outcomes, machine="A machine.").splitlines() == [
        "A machine.",
        "",
        "| part | stage | seconds | GPU memory, GiB: peak | after | seen |",
        "|---|---|---|---|---|---|",
        "| shared | train 1 | 3.2 | 10.0 | 1.0 | a\\|b c |",
        "| shared | **failed** |  |  |  | exit code 1 |",
        "| separate | **left out** |  |  |  | needs 2 GPUs, there is 1 |",
    ]


def test_without_a_gpu_it_says_so_in_one_line_and_ends_with_3(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", "--out", str(out)],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr == "gpu-check: no GPU here (nvidia-smi shows none), nothing was checked\n"
    assert not out.exists()


@pytest.mark.nightly
def test_on_a_cpu_a_part_is_rehearsed_to_its_table(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", "--rehearse", "--only", "adapters", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| adapters")]
    stages = ["start engines", *(f"{stage} {i}" for i in (1, 2) for stage in ("collect", "train", "sync"))]
    assert [row[1] for row in rows] == [*stages, "**passed**"]
    # Steps this small are below what bfloat16 rounds: hashes then show what is served.
    assert all(re.search("proven|indistinguishable", row[5]) for row in rows if row[1].startswith("sync"))
