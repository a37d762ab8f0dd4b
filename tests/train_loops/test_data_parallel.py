"""Data-parallel workers and ZeRO: two workers learn as one does, and a checkpoint resumes in any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from synthetic_traces import GROUP
from tiers import EVERYTHING
from two_workers import Job, Result, play, play_by_two

from stores.types import ModelVersionRef
from stores.weights.store import WeightStore
from train_loops.config import (
    CriticConfig,
    DeepSpeedConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    TrainConfig,
)
from train_loops.engine.deepspeed_engine import join_workers, load_policy
from train_loops.engine.warmstart import adopt

pytestmark = pytest.mark.test

TOLERANCE = 5e-5
LR = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)

GRPO: dict[str, Any] = {"algorithm": "grpo", "loss": LossConfig(kl_in_loss_coef=0.1, entropy_coef=0.01)}
OWN: dict[str, Any] = {
    "algorithm": "ppo",
    "critic": CriticConfig(optimizer=LR),
    "loss": LossConfig(aggregation="seq_mean_token_sum_norm", norm_tokens=6),
}
SHARED: dict[str, Any] = {"algorithm": "ppo", "critic": CriticConfig(kind="shared")}
FROZEN: dict[str, Any] = {"algorithm": "ppo", "critic": CriticConfig(kind="frozen", hidden_size=8, optimizer=LR)}
WARM_UP: dict[str, Any] = {
    "algorithm": "ppo",
    "critic": CriticConfig(kind="shared", hidden_size=8),
    "optimizer": LR.model_copy(update={"weight_decay": 0.1}),
}
LEARNERS = {"grpo": GRPO, "own": OWN, "shared": SHARED, "frozen": FROZEN, "warm-up": WARM_UP}
LAYOUTS = {
    "z0": DeepSpeedConfig(),
    "z1-offload": DeepSpeedConfig(zero_stage=1, offload_optimizer=True),
    "z2": DeepSpeedConfig(zero_stage=2),
    "z3": DeepSpeedConfig(zero_stage=3),
    "z3-offload": DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True),
    "sequences": DeepSpeedConfig(sequence_parallel=2),
    "sequences-z3": DeepSpeedConfig(sequence_parallel=2, zero_stage=3, gradient_checkpointing=True),
}
PAIRS = [
    ("grpo", "z0"),
    ("grpo", "z1-offload"),
    ("grpo", "z3"),
    ("own", "z0"),
    ("own", "z2"),
    ("own", "z3"),
    ("shared", "z1-offload"),
    ("shared", "z3"),
    ("frozen", "z2"),
    ("frozen", "z3-offload"),
    ("warm-up", "z2"),
    ("warm-up", "z3"),
    ("grpo", "sequences"),
    ("own", "sequences-z3"),
    ("shared", "sequences"),
    ("frozen", "sequences-z3"),
    ("warm-up", "sequences"),
]


RESUMED = [("own", "z3"), ("shared", "z2"), ("frozen", "z1-offload")]
EACH_PUSH = [("own", "z0"), ("shared", "z1-offload"), ("own", "z2"), ("shared", "sequences"), ("own", "z3")]
"""One pair for each ZeRO stage, one of shared sequences, and one checkpoint; `make nightly` plays all."""


def each_push(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Every pair; those outside of `EACH_PUSH` are played by `make nightly` only."""
    return [pytest.param(*pair, marks=() if pair in EACH_PUSH else pytest.mark.nightly) for pair in pairs]


def job(learner: str, layout: str, *, resumes: str | Path = "") -> Job:
    config = TrainConfig(
        deepspeed=LAYOUTS[layout],
        num_workers=LAYOUTS[layout].sequence_parallel,
        num_minibatches=3,
        microbatch_tokens=64,
        # The second time it learns from the rows of the first: far from on-policy.
        mismatch=MismatchConfig(limit_mean=5.0),
        **{"optimizer": LR} | LEARNERS[learner],
    )
    name = f"{learner}-{layout}{'-resumed' if resumes else ''}"
    return Job(name=name, config=config, resumes=str(resumes), warms_up=learner == "warm-up")


@dataclass(frozen=True)
class Played:
    """Every learner by one worker at stage 0; every pair by two workers; and each resumed from the other's checkpoint."""

    folder: Path
    one: Mapping[str, Result]
    two: Mapping[str, Result]


@pytest.fixture(scope="module")
def store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ModelVersionRef]:
    uri = str(tmp_path_factory.mktemp("weights"))
    return uri, adopt(tiny_model, store=WeightStore(uri), model_group=GROUP, run_id="run")


@pytest.fixture(scope="module")
def played(
    store: tuple[str, ModelVersionRef], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Played:
    """Plays what the cases of the tier ask for."""
    is_whole = request.config.getoption("tier") == EVERYTHING
    pairs, resumed = (PAIRS, RESUMED) if is_whole else (EACH_PUSH, EACH_PUSH[-1:])
    join_workers()
    folder, about = tmp_path_factory.mktemp("played"), {"weights_uri": store[0], "parent": store[1]}
    one = play([job(learner, "z0") for learner in dict(pairs)], folder / "one", **about)
    jobs = [job(*pair) for pair in pairs]
    jobs += [job(learner, layout, resumes=folder / "one" / f"{learner}-z0" / "half") for learner, layout in resumed]
    return Played(folder, one, play_by_two(jobs, folder / "two", **about))


@pytest.mark.parametrize(("learner", "layout"), each_push(PAIRS))
def test_two_workers_make_the_update_that_one_makes(played: Played, learner: str, layout: str) -> None:
    one, two = played.one[f"{learner}-z0"], played.two[f"{learner}-{layout}"]
    print(f"{learner} {layout}: largest difference {(one.weights - two.weights).abs().max():.1e}, {two.figures}")
    assert two.figures == pytest.approx(one.figures, rel=1e-3, abs=1e-6)
    assert (one.weights - two.weights).abs().max() < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["z2", "z3"])
def test_while_a_head_on_the_policys_trunk_warms_up_nothing_else_changes(
    played: Played, store: tuple[str, ModelVersionRef], layout: str
) -> None:
    result = played.two[f"warm-up-{layout}"]
    parent = torch.cat(
        [
            p.detach().flatten()
            for p in load_policy(WeightStore(store[0]).fetch(store[1]), DeepSpeedConfig()).parameters()
        ]
    )
    assert torch.equal(result.weights[: -len(result.head)], parent)
    assert len(result.head) == 64 * 8 + 8 + 8 + 1 and bool((result.head[-9:] != 0).all())


@pytest.mark.parametrize(("learner", "layout"), each_push(RESUMED))
def test_a_checkpoint_of_one_worker_passes_through_two_bit_for_bit(played: Played, learner: str, layout: str) -> None:
    written = played.folder / "one" / f"{learner}-z0" / "half"
    again = played.folder / "two" / f"{learner}-{layout}-resumed" / "begin"
    for tag in ["policy"] + ["critic"] * (learner != "shared"):
        before, after = (load_file(f / f"{tag}.safetensors") for f in (written, again))
        assert before.keys() == after.keys() and any(name.startswith("exp_avg_sq.") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (written / f"{tag}.json").read_text() == (again / f"{tag}.json").read_text()


@pytest.mark.parametrize(("learner", "layout"), each_push(RESUMED))
def test_two_workers_go_on_from_a_checkpoint_of_one(played: Played, learner: str, layout: str) -> None:
    one, two = played.one[f"{learner}-z0"], played.two[f"{learner}-{layout}-resumed"]
    assert two.figures == pytest.approx(one.figures[-len(two.figures) :], rel=1e-3, abs=1e-6)
    assert (one.weights - two.weights).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("learner", "layout"), each_push([("grpo", "z3"), ("own", "z3"), ("shared", "z3"), ("frozen", "z3-offload")])
)
def test_one_worker_at_stage_0_goes_on_from_a_checkpoint_of_two_at_stage_3(
    played: Played, store: tuple[str, ModelVersionRef], tmp_path: Path, learner: str, layout: str
) -> None:
    resumed = job(learner, "z0", resumes=played.folder / "two" / f"{learner}-{layout}" / "half")
    [result] = play([resumed], tmp_path, weights_uri=store[0], parent=store[1]).values()
    expected = played.two[f"{learner}-{layout}"]
    assert result.figures == pytest.approx(expected.figures[-len(result.figures) :], rel=1e-3, abs=1e-6)
    assert (result.weights - expected.weights).abs().max() < TOLERANCE
