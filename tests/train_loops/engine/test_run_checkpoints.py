"""The folders of a model group's checkpoints: which keep their files once a version is committed, and what is never stored."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from synthetic_engine import OPTIMIZER, train

from tests.train_loops.test_train_job import train_job
from train_loops.config import DeepSpeedConfig
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, join_workers, load_critic, load_policy
from train_loops.engine.models import Models
from train_loops.engine.run_checkpoints import CarriedState, drop_older, store_state

pytestmark = pytest.mark.test


def test_the_last_two_versions_and_their_parent_keep_their_checkpoints_however_often_one_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    names = [
        "a-v7-00000000",
        "a-v9-00000000",
        "a-v10-00000000",
        "a-v11-00000001",
        "a-v11-00000002",
        "a-v11-00000003",
        "a-b-v1-00000000",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.json").write_text("{}")
    drop_older(str(tmp_path), "a", parent=7)  # 9, 10 and 11 were trained from the champion, and rejected
    left = {path.parent.name for path in tmp_path.glob("*/policy.json")}
    assert left == set(names) - {"a-v9-00000000"}
    assert (tmp_path / "a-v9-00000000").is_dir(), "Ray Train may know it, and fails where it is gone"
    drop_older(str(tmp_path / "nothing"), "a", parent=7)


@pytest.mark.parametrize("place", ["critic", "value_head", "moment"])
def test_training_state_that_is_not_finite_is_not_stored(tiny_model: Path, tmp_path: Path, place: str) -> None:
    join_workers()
    config = DeepSpeedConfig()
    scorer = load_policy(tiny_model, config)
    if place == "value_head":
        scorer.value_head = value_head(scorer.model.config.hidden_size, hidden_size=0, dtype=torch.float32)
    policy = Engine(scorer, optimizer=OPTIMIZER, config=config)
    critic = Engine(load_critic(tiny_model, config), optimizer=OPTIMIZER, config=config) if place == "critic" else None
    if place == "moment":
        train(policy, 1)
    with torch.no_grad():
        if critic is not None:
            critic.module.head.bias.fill_(math.inf)
        elif scorer.value_head is not None:
            scorer.value_head.bias.fill_(math.nan)
        else:
            next(iter(policy._optimizer.state.values()))["exp_avg_sq"][0] = math.inf
    models, job = Models(policy=policy, critic=critic), train_job()
    with pytest.raises(ValueError, match=r"version 3 of shared is not stored: tensor .* holds infinity or NaN"):
        store_state(models, CarriedState(kl_coef=0.0), job=job, run_folder=str(tmp_path), has_own_weights=False)
    models.close()
