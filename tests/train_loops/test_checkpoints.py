"""Checkpoints are of parameters: whatever ZeRO stage and number of workers wrote them, any other goes on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from synthetic_engine import OPTIMIZER, train, weights

from train_loops.config import CriticConfig, DeepSpeedConfig, OptimizerConfig
from train_loops.engine import Engine, join_workers, load_critic, load_policy
from train_loops.learning_rate import learning_rate
from train_loops.weight_writer import write_safetensors

LAYOUTS = [
    DeepSpeedConfig(),
    DeepSpeedConfig(zero_stage=1),
    DeepSpeedConfig(zero_stage=2, offload_optimizer=True),
    DeepSpeedConfig(zero_stage=3),
    DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True),
]


@pytest.fixture(scope="module", autouse=True)
def one_worker():
    join_workers()


def engine_of(folder: Path, config: DeepSpeedConfig) -> Engine:
    return Engine(load_policy(folder, config), optimizer=OPTIMIZER, config=config)


@pytest.mark.parametrize("wrote", LAYOUTS, ids=str)
def test_a_run_goes_on_from_a_checkpoint_of_any_layout(
    tiny_model: Path, tmp_path: Path, wrote: DeepSpeedConfig
) -> None:
    first = engine_of(tiny_model, wrote)
    train(first, 2)
    first.save(tmp_path, tag="policy", state={"version": 7})
    expected = train(first, 2)
    for reads in LAYOUTS:
        second = engine_of(tiny_model, reads)
        assert second.fits(tmp_path, tag="policy")
        assert second.load(tmp_path, tag="policy") == {"version": 7} and second.num_steps == 2
        assert train(second, 2) == pytest.approx(expected, rel=1e-5)
        assert (weights(first) - weights(second)).abs().max() < 2e-6
        second.close()


def test_a_checkpoint_before_the_first_step_has_no_moments(tiny_model: Path, tmp_path: Path) -> None:
    first = engine_of(tiny_model, DeepSpeedConfig())
    first.save(tmp_path, tag="policy", state={})
    with safe_open(tmp_path / "policy.safetensors", framework="pt") as file:
        assert all(name.startswith("master.") for name in file.keys())  # noqa: SIM118
    second = engine_of(tiny_model, DeepSpeedConfig(zero_stage=1))
    second.load(tmp_path, tag="policy")
    assert second.num_steps == 0
    assert train(second, 1) == pytest.approx(train(first, 1), rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    config = DeepSpeedConfig()
    engine = engine_of(tiny_model, config)
    engine.save(tmp_path, tag="policy", state={})
    frozen = load_critic(tiny_model, config, CriticConfig(kind="frozen"))
    critic = Engine(frozen, optimizer=OPTIMIZER, config=config)
    assert not critic.fits(tmp_path, tag="policy") and not critic.fits(tmp_path, tag="critic")
    with pytest.raises(ValueError, match=r"of another model: head\.bias is not there, wanted"):
        critic.load(tmp_path, tag="policy")
    with pytest.raises(ValueError, match="holds no checkpoint of 'critic'"):
        critic.load(tmp_path, tag="critic")


@pytest.mark.parametrize(("kind", "hidden"), [("own", 0), ("own", 8), ("frozen", 0), ("frozen", 8)])
def test_a_critics_checkpoint_holds_what_it_trains_and_restores_it(
    tiny_model: Path, tmp_path: Path, kind: str, hidden: int
) -> None:
    config, settings = DeepSpeedConfig(), CriticConfig(kind=kind, hidden_size=hidden)

    def critic() -> Engine:
        return Engine(load_critic(tiny_model, config, settings), optimizer=OPTIMIZER, config=config)

    def learn(engine: Engine) -> float:
        from synthetic_engine import batches

        engine.backward((engine(batches(1)[0]) - 1).square().mean(), is_last=True)
        return engine.step().grad_norm

    first = critic()
    before = torch.cat([p.flatten() for p in first.module.trunk.parameters()]).detach().clone()
    for _ in range(3):
        learn(first)
    after = torch.cat([p.flatten() for p in first.module.trunk.parameters()])
    assert torch.equal(before, after) == (kind == "frozen")
    first.save(tmp_path, tag="critic", state={})
    with safe_open(tmp_path / "critic.safetensors", framework="pt") as file:
        assert any("trunk" in name for name in file.keys()) == (kind == "own")  # noqa: SIM118
    second = critic()
    second.load(tmp_path, tag="critic")
    assert learn(second) == pytest.approx(learn(first), rel=1e-6)


def test_written_tensors_are_read_back_bit_for_bit_in_their_dtypes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(()), "d": torch.empty(0, 4)}
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    write_safetensors(tmp_path / "x.safetensors", shapes, tensors.values(), dtypes={"b": "BF16"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, want: list[float]) -> None:
    decay = {} if schedule == "constant" else {"decay_steps": 6, "min_lr_share": 0.1}
    settings = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule, **decay)
    np.testing.assert_allclose([learning_rate(settings, step) for step in range(8)], want, atol=1e-6)
