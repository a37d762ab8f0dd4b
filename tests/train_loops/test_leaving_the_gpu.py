"""A trainer that leaves its GPU after a job: its engines go on as if they had stayed. On a CPU, from memory to memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from synthetic_engine import OPTIMIZER, train, weights
from synthetic_traces import GROUP

from stores.weights.store import WeightStore
from train_loops.config import DeepSpeedConfig, LossConfig, TrainConfig
from train_loops.engine.deepspeed_engine import Engine, load_policy
from train_loops.engine.models import build_models
from train_loops.engine.warmstart import adopt
from train_loops.worker.trainer import Worker

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_worker")]

LAYOUTS = {
    "z0": DeepSpeedConfig(),
    "z1": DeepSpeedConfig(zero_stage=1),
    "z1-offload": DeepSpeedConfig(zero_stage=1, offload_optimizer=True),
    "z0-bf16": DeepSpeedConfig(bf16=True),
    "z2-bf16": DeepSpeedConfig(zero_stage=2, bf16=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_left_the_gpu_between_steps_learns_the_same_to_the_bit(tiny_model: Path, layout: str) -> None:
    config = LAYOUTS[layout]
    stayed, left = (Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config) for _ in range(2))
    expected = train(stayed, 4)
    found = train(left, 2)
    assert left.offload()
    left.reload()
    found += train(left, 2)
    assert found == expected
    assert torch.equal(weights(left), weights(stayed))
    assert left.offload()
    for engine in (stayed, left):
        engine.close()


def test_under_zero_3_nothing_is_moved(tiny_model: Path) -> None:
    config = DeepSpeedConfig(zero_stage=3)
    engine = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    assert not engine.offload()
    assert train(engine, 1)[0] > 0
    engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_worker_keeps_offloaded_engines_for_the_next_job_and_gives_up_those_that_cannot_be(
    tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    parent = adopt(tiny_model, store=store, model_group=GROUP, run_id="r", sequences=((1, 2),))
    config = TrainConfig(deepspeed=DeepSpeedConfig(zero_stage=stage), loss=LossConfig(kl_in_loss_coef=0.1))
    worker = Worker(threads=1, run_folder=str(tmp_path / "run"))
    worker._models, worker._held, worker._train = build_models(store, parent, config), parent, config
    before = worker._models
    worker.leave_gpu()
    worker.leave_gpu()  # a job of the team's learner in between touches no engine
    assert worker._is_offloaded == (stage < 3)
    assert worker._models is (before if stage < 3 else None)
    worker._return_to_gpu()
    worker._return_to_gpu()
    if stage < 3:
        assert train(before.policy, 1)[0] > 0
        before.close()


def test_a_worker_gives_up_engines_that_a_job_left_half_way(tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    parent = adopt(tiny_model, store=store, model_group=GROUP, run_id="r", sequences=((1, 2),))
    worker = Worker(threads=1, run_folder=str(tmp_path / "run"))
    worker._models = build_models(store, parent, TrainConfig())
    worker.leave_gpu()  # no version has its weights
    assert worker._models is None
    assert not worker._is_offloaded
