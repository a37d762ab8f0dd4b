"""What a run will take on the disk is worked out from its version 0, and refused where it does not fit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.extensions.model_plan import disk
from pipelines.extensions.model_plan.disk import check_disk, disk_needs
from pipelines.run.run import Run
from stores.files import write_file
from stores.journal.stage_results import Decided
from stores.weights.manifest import Probe

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"
MILLION = 1_000_000


@pytest.fixture
def run_of(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run_of(**changes)`: a run whose version 0 says that it has 135 million parameters in float32."""

    def open_run(**changes: Any) -> Run:
        limits = {"iterations": 10, "evaluate.every": 10, "maintain.weights_limit_gb": 1}
        run = Run(load_config(SMALL, {"storage.root": str(tmp_path), **limits, **changes}))
        probe = Probe(sequences=((1, 2),), logprobs=((-0.1,),))
        run.weights.commit(tiny_model, model_group="team", version=0, parent=None, run_id="r", iteration=0, probe=probe)
        large = SimpleNamespace(size_bytes=540 * MILLION, tensors={"w": ("F32", (135, MILLION))}, base=None)
        monkeypatch.setattr(disk, "read_manifest", lambda ref: large)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return run

    return open_run


def test_a_run_of_a_model_of_135_million_parameters_keeps_little(run_of: Any) -> None:
    (need,) = disk_needs(run_of())
    # While an iteration is written: the newest version, the next one and its copy, one more champion; two checkpoints.
    assert need.needed_bytes == (4 * 540 + 2 * 1080) * MILLION
    (need,) = disk_needs(run_of(**{"maintain.weights_limit_gb": None}))
    assert need.needed_bytes == (11 * 540 + 2 * 1080) * MILLION, "without a limit every version stays"
    (need,) = disk_needs(run_of(**{"train.algorithm": "ppo"}))
    assert need.needed_bytes == (4 * 540 + 2 * 2700) * MILLION, "a critic has a checkpoint, too"
    (need,) = disk_needs(run_of(**{"train.deepspeed.bf16": True}))
    assert need.needed_bytes == (1000 + 270 + 2 * 1620) * MILLION, (
        "versions up to the limit; a checkpoint's weights are float32"
    )
    (need,) = disk_needs(run_of(**{"promote.on_reject": "champion"}))
    assert need.needed_bytes == (4 * 540 + 3 * 1080) * MILLION, "the champion's checkpoint stays, too"
    (need,) = disk_needs(run_of(iterations=1))
    assert need.needed_bytes == (2 * 540 + 1080) * MILLION


def test_a_critic_of_an_adapters_group_is_as_large_as_the_base(run_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    large = SimpleNamespace(size_bytes=540 * MILLION, tensors={"w": ("F32", (135, MILLION))}, base=None)
    adapter = SimpleNamespace(size_bytes=4 * MILLION, tensors={"a": ("F32", (MILLION,))}, base="base")
    run = run_of(**{"model_groups.team.base": "shared", "train.lora": {"rank": 8}, "train.algorithm": "ppo"})
    monkeypatch.setattr(disk, "read_manifest", lambda ref: large if ref == "base" else adapter)
    (need,) = disk_needs(run)
    assert need.needed_bytes == (11 * 4 + 2 * (12 + 12 * 135)) * MILLION


def test_what_is_written_already_is_not_needed_again(run_of: Any) -> None:
    run = run_of()
    (before,) = disk_needs(run)
    write_file(f"{run.folder}/checkpoints/{run.run_id}-team/team-v3-01234567/policy.safetensors", b"x" * 1000)
    write_file(f"{run.weights.uri_of('team', 3)}/model.safetensors", b"x" * 100)
    (after,) = disk_needs(run)
    assert before.needed_bytes - after.needed_bytes == 1100


def test_iterations_that_are_done_need_nothing_more_when_their_versions_are_removed(run_of: Any) -> None:
    run = run_of(**{"maintain.weights_limit_gb": None})
    for number in range(1, 9):
        run.journal.once(run.key(number, Decided.STAGE), lambda lease: {})
    (need,) = disk_needs(run)
    assert need.needed_bytes == (2 * 540 + 540 + 2 * 1080) * MILLION, "two versions, the copy of one, two checkpoints"


def test_a_run_that_does_not_fit_is_refused_before_it_starts(run_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=6 * 10**9))
    (line,) = check_disk(run)
    assert "up to 4.3 GB more" in line and "6.0 GB are free" in line
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 * 10**9))
    with pytest.raises(ValueError, match=r"4\.3 GB more at .*, 3\.0 GB are free: free some, .*maintain\.keep_versions"):
        check_disk(run)
