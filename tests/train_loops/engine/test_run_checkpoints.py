"""The folders of a model group's checkpoints: which keep their files once a version is committed, and what is never stored."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from synthetic_engine import OPTIMIZER, train

from stores.files import write_file
from tests.train_loops.test_train_job import train_job
from train_loops.config import DeepSpeedConfig, LossConfig
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, join_workers, load_critic, load_policy
from train_loops.engine.models import Models
from train_loops.engine.run_checkpoints import CarriedState, drop_older, resume, store_state, sweep

pytestmark = pytest.mark.test


def test_the_last_two_versions_their_parent_and_the_champion_keep_their_checkpoints_however_often_one_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    names = [
        "a-v6-00000000",
        "a-v7-00000000",
        "a-v8-00000000",
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
    # 7 is the champion: the gate could not decide on 8, which 9, 10 and 11 were trained from. A rejection of 11 goes back to 7.
    drop_older(str(tmp_path), "a", needed={8, 7})
    left = {path.parent.name for path in tmp_path.glob("*/policy.json")}
    assert left == set(names) - {"a-v6-00000000", "a-v9-00000000"}
    assert (tmp_path / "a-v9-00000000").is_dir(), "Ray Train may know it, and fails where it is gone"
    drop_older(str(tmp_path), "a", needed={8, None})
    assert {path.parent.name for path in tmp_path.glob("*/policy.json")} == left - {"a-v7-00000000"}
    drop_older(str(tmp_path / "nothing"), "a", needed={7})


def test_a_checkpoint_of_a_model_group_of_any_name_is_resumed_from_object_storage(
    tiny_model: Path, tmp_path: Path, s3_uri: str
) -> None:
    join_workers()
    engine = Engine(load_policy(tiny_model, DeepSpeedConfig()), optimizer=OPTIMIZER, config=DeepSpeedConfig())
    train(engine, 1)
    engine.save(tmp_path, tag="policy", state={"kl_coef": 0.0, "num_critic_jobs": 0})
    fresh = Engine(load_policy(tiny_model, DeepSpeedConfig()), optimizer=OPTIMIZER, config=DeepSpeedConfig())
    for group in ("löser 1", "a[1]%20"):
        uri = f"{s3_uri}/run-{group}/{group}-v1-00000000"
        for file in tmp_path.glob("policy.*"):
            write_file(f"{uri}/{file.name}", file.read_bytes())
        for place, lost in ((uri, []), (f"{uri}0", ["optimizer"])):
            resumed = resume(place, Models(policy=fresh), state=CarriedState(kl_coef=0.0), loss=LossConfig())
            assert resumed == (CarriedState(kl_coef=0.0), lost)
        assert fresh.num_steps == 1
    for each in (engine, fresh):
        each.close()


def test_what_killed_tries_left_of_a_version_is_swept_whatever_its_model_group_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for group in ("a", "a[1]"):
        for name in (f"{group}-v2-00000000", f"{group}-v3-00000000"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "policy.safetensors").write_text("")
    sweep(str(tmp_path), train_job(model_group="a[1]"))
    left = {path.parent.name for path in tmp_path.glob("*/*")}
    assert left == {"a-v2-00000000", "a-v3-00000000", "a[1]-v2-00000000"}


@pytest.mark.parametrize("name", ["policy.safetensors", "policy.json"])
def test_a_checkpoint_that_a_power_cut_damaged_is_named_with_what_to_do(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    join_workers()
    engine = Engine(load_policy(tiny_model, DeepSpeedConfig()), optimizer=OPTIMIZER, config=DeepSpeedConfig())
    engine.save(tmp_path, tag="policy", state={"kl_coef": 0.0, "num_critic_jobs": 0})
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"checkpoint {tmp_path} cannot be resumed: .*{name}.* empty its folder"):
        resume(str(tmp_path), Models(policy=engine), state=CarriedState(kl_coef=0.0), loss=LossConfig())
    engine.close()


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
