"""Folders as they are published, in bfloat16: each family trains a step, is exported and read back as what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chained_samples import chained_samples

from serve_apps.policy.proof import judge, limits_for, max_difference
from stores.weights.manifest import Probe
from stores.weights.model_folder import check_model_files, why_windowed
from stores.weights.store import WeightStore
from tests.published_shapes import SHAPES, WINDOWED, write_shape
from train_loops.config import DeepSpeedConfig, OptimizerConfig, RowsConfig, TrainConfig
from train_loops.engine.deepspeed_engine import Engine, load_model, load_policy
from train_loops.engine.export import export_weights
from train_loops.engine.logprobs import probe_logprobs
from train_loops.engine.models import Models
from train_loops.engine.warmstart import adopt, make_probe
from train_loops.rows.batching import device
from train_loops.rows.packed_attention import why_not_packed
from train_loops.rows.samples import Funnel
from train_loops.worker.learner import learn

pytestmark = [pytest.mark.test, pytest.mark.usefixtures("one_worker")]


@pytest.mark.parametrize("bf16", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["bf16", "float32"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_published_folder_trains_and_its_next_version_is_proven(family: str, bf16: bool, tmp_path: Path) -> None:
    folder = write_shape(family, tmp_path / "v0")
    windows = why_windowed(check_model_files(folder))
    assert bool(windows) == (family in WINDOWED)
    first = adopt(folder, store=WeightStore(str(tmp_path / "weights")), model_group="g", run_id="r")
    before = WeightStore(str(tmp_path / "weights")).manifest(first).probe
    config = TrainConfig(
        optimizer=OptimizerConfig(lr=1e-2 if bf16 else 1e-4),
        deepspeed=DeepSpeedConfig(bf16=bf16),
        mismatch={"tolerance_mean": 1e6, "tolerance_max": 1e6, "limit_mean": 1e6},  # type: ignore[arg-type]
    )
    policy = Engine(load_policy(folder, config.deepspeed), optimizer=config.optimizer, config=config.deepspeed)
    assert bool(why_not_packed(policy.module.model)) == bool(windows)
    funnel = Funnel(model_group="g")
    learned = learn(
        chained_samples(), Models(policy=policy), config=config, credit_kind="returns", seed=0, funnel=funnel
    )
    assert not learned.reason and learned.metrics["train/trained_rows"] > 0
    probe = Probe(sequences=before.sequences, logprobs=probe_logprobs(policy, before.sequences, on=device()))
    out = export_weights(policy, parent=folder, out=tmp_path / "v1")
    check_model_files(out)
    # What an engine of the trainer's dtype would answer.
    served = make_probe(load_model(out, config.deepspeed).eval(), before.sequences).logprobs
    limits = limits_for("bfloat16" if bf16 else "float32", "bfloat16" if bf16 else "float32")
    verdict, _, _ = judge(
        served, probe.logprobs, served, before.logprobs, tolerance=limits.tolerance, noise=limits.noise
    )
    assert verdict == "proven", (max_difference(served, probe.logprobs), max_difference(served, before.logprobs))
    policy.close()


def test_packed_and_padded_rows_of_a_model_without_windows_teach_the_same(tmp_path: Path) -> None:
    weights = []
    for pack in ("auto", True, False):
        config = TrainConfig(
            rows=RowsConfig(pack=pack),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(lr=1e-4),
            mismatch={"tolerance_mean": 1e6, "tolerance_max": 1e6, "limit_mean": 1e6},  # type: ignore[arg-type]
        )
        folder = write_shape("qwen3", tmp_path / str(pack))
        policy = Engine(load_policy(folder, config.deepspeed), optimizer=config.optimizer, config=config.deepspeed)
        learn(
            chained_samples(),
            Models(policy=policy),
            config=config,
            credit_kind="returns",
            seed=0,
            funnel=Funnel(model_group="g"),
        )
        weights.append(torch.cat([x.flatten() for _, x in policy.tensors(policy.module)]))
        policy.close()
    assert torch.equal(weights[0], weights[1]), "auto packs what can be packed"
    assert (weights[1] - weights[2]).abs().max() < 5e-5
