"""Nothing is random in the update: the network that trains is the one whose tokens were scored before, whatever its config says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from synthetic_engine import batches
from synthetic_traces import GROUP, sample_traces
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.model_folders import change_json
from train_loops.config import CriticConfig, DeepSpeedConfig, LoraConfig, OptimizerConfig, TrainConfig
from train_loops.engine.adapters import load_adapted, make_adapter
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import (
    Engine,
    load_critic,
    load_model,
    load_policy,
)
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs
from train_loops.engine.models import Models
from train_loops.rows.samples import Funnel, samples_of
from train_loops.worker.learner import learn

pytestmark = [pytest.mark.test, pytest.mark.usefixtures("one_worker")]

SLOW = OptimizerConfig(lr=1e-9)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "attention_dropout": 0.3},
    "gpt2": GPT_SIZES | {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "gpt_neox": SIZES | {"intermediate_size": 64, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "starcoder2": SIZES | {"intermediate_size": 64, "residual_dropout": 0.3, "embedding_dropout": 0.3},
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.5},
    "mixtral": SIZES
    | {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 2, "router_jitter_noise": 0.3},
}
"""By model type what is random in training: dropout of attention, of what it adds, of embeddings; layers and experts."""


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with dropout in its attention."""
    folder = tmp_path_factory.mktemp("dropout") / "model"
    shutil.copytree(tiny_model, folder)
    change_json(folder / "config.json", attention_dropout=0.5)
    return folder


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("model_type", RANDOM)
def test_a_token_has_the_same_logprob_where_it_trains_as_where_it_is_scored(model_type: str, recomputes: bool) -> None:
    shape = transformers.AutoConfig.for_model(model_type, vocab_size=300, **RANDOM[model_type])
    model = transformers.AutoModelForCausalLM.from_config(shape)
    if recomputes:
        model.gradient_checkpointing_enable()
    engine = Engine(PolicyScorer(model), optimizer=SLOW, config=DeepSpeedConfig())
    calls: list[nn.Module] = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    batch = batches(1)[0]
    with torch.no_grad():
        scored = completion_logprobs(engine, batch)
    assert len(calls) == 2
    trained = completion_logprobs(engine, batch)
    engine.backward(-trained.sum(), is_last=True)
    assert torch.equal(trained, scored)
    assert len(calls) == (6 if recomputes else 4), "backward recomputes both layers"
    assert engine.step().is_applied
    engine.close()


def test_the_first_minibatch_has_a_ratio_of_1_though_the_folder_names_dropout(folder: Path) -> None:
    samples = [s for t, r in zip(*sample_traces(folder), strict=True) for s in samples_of(t, r, model_group=GROUP)]
    config = TrainConfig(algorithm="ppo", optimizer=SLOW, critic=CriticConfig(optimizer=SLOW))
    models = Models(
        policy=Engine(load_policy(folder, config.deepspeed), optimizer=SLOW, config=config.deepspeed),
        critic=Engine(load_critic(folder, config.deepspeed), optimizer=SLOW, config=config.deepspeed),
    )
    funnel = Funnel(model_group=GROUP)
    metrics = learn(samples, models, config=config, credit_kind="returns", seed=0, funnel=funnel).metrics
    assert metrics["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["train/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/clip_share"] == 0
    models.close()


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_critic_gives_a_state_the_same_value_where_it_trains(folder: Path, recomputes: bool) -> None:
    config = DeepSpeedConfig(gradient_checkpointing=recomputes)
    critic = load_critic(folder, config)
    critic.head = nn.Sequential(nn.Linear(64, 64), value_head(64, hidden_size=0, dtype=torch.float32))
    nn.init.normal_(critic.head[1].weight)
    engine = Engine(critic, optimizer=SLOW, config=config)
    batch = batches(1)[0]
    with torch.no_grad():
        scored = engine(batch)
    assert scored.std() > 0 and torch.equal(engine(batch), scored)
    engine.close()


def test_the_dropout_that_an_adapters_folder_names_is_off(folder: Path, tmp_path: Path) -> None:
    config = DeepSpeedConfig(gradient_checkpointing=True)
    adapter = make_adapter(load_model(folder, config), LoraConfig(rank=4), seed=1, out=tmp_path / "adapter")
    change_json(adapter / "adapter_config.json", lora_dropout=0.5)
    policy = load_adapted(folder, adapter, config)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    engine = Engine(policy, optimizer=SLOW, config=config)
    batch = batches(1)[0]
    with torch.no_grad():
        scored = completion_logprobs(engine, batch)
    assert torch.equal(completion_logprobs(engine, batch), scored)
    engine.close()
