"""The engine: DeepSpeed learns as plain PyTorch does, resumes exactly, exports what can be served, compiles nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_dtypes import in_dtype
from safetensors.torch import load_file
from stored_head import with_stored_head
from synthetic_engine import OPTIMIZER, batches, train, weights

from stores.weights.manifest import read_safetensors_header
from train_loops.config import CriticConfig, DeepSpeedConfig, OptimizerConfig, TrainConfig
from train_loops.engine.critic import value_head
from train_loops.engine.deepspeed_engine import Engine, load_critic, load_policy
from train_loops.engine.export import export_weights
from train_loops.engine.logprobs import completion_logprobs
from train_loops.engine.run_checkpoints import EXPORTED
from train_loops.engine.state_sizes import has_own_weights

pytestmark = [pytest.mark.test, pytest.mark.usefixtures("one_worker")]

ZERO_3 = pytest.param(3, marks=pytest.mark.nightly)
"""ZeRO 3 in one process takes three times as long as the others; on each push test_data_parallel.py plays it."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_learns_like_plain_pytorch(tiny_model: Path, stage: int) -> None:
    config = DeepSpeedConfig(zero_stage=stage)
    engine = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    norms = train(engine, 3)
    plain = load_policy(tiny_model, config)
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    expected = []
    for step in range(3):
        for batch in batches():
            (-completion_logprobs(plain, batch).sum() / 50).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx(expected, rel=1e-4)
    difference = weights(engine) - torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert difference.abs().max() < 2e-5
    engine.close()


@pytest.mark.parametrize("config", [DeepSpeedConfig(), DeepSpeedConfig(zero_stage=2, bf16=True)], ids=["z0", "z2-bf16"])
def test_a_checkpoint_continues_as_if_nothing_had_happened(
    tiny_model: Path, tmp_path: Path, config: DeepSpeedConfig
) -> None:
    first = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    train(first, 2)
    first.save(tmp_path, tag="policy", state={"version": 7})
    expected = train(first, 2)
    second = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    assert second.load(tmp_path, tag="policy") == {"version": 7}
    assert train(second, 2) == expected
    assert torch.equal(weights(first), weights(second))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, ZERO_3])
def test_a_checkpoint_without_the_weights_that_the_version_holds_continues_as_well_whatever_its_parent_is_stored_in(
    tiny_model: Path, tmp_path: Path, stage: int, stored: str
) -> None:
    config, parent = DeepSpeedConfig(zero_stage=stage), in_dtype(tiny_model, tmp_path / "v0", stored)
    assert not has_own_weights(TrainConfig(deepspeed=config))
    first = Engine(load_policy(parent, config), optimizer=OPTIMIZER, config=config)
    train(first, 2)
    first.save(tmp_path, tag="whole", state={})
    first.save(tmp_path, tag="moments", state={"version": 7}, but=EXPORTED)
    version = export_weights(first, parent=parent, out=tmp_path / "v1")
    expected = train(first, 2)
    whole, moments = (load_file(tmp_path / f"{tag}.safetensors") for tag in ("whole", "moments"))
    assert len(moments) * 3 == len(whole) * 2 and not any(name.startswith("master.") for name in moments)
    second = Engine(load_policy(version, config), optimizer=OPTIMIZER, config=config)
    assert second.fits(tmp_path, tag="moments") and second.load(tmp_path, tag="moments") == {"version": 7}
    assert train(second, 2) == expected
    assert torch.equal(weights(first), weights(second))
    for engine in (first, second):
        engine.close()


LAYOUTS = {
    "z0": DeepSpeedConfig(),
    "z1-offload": DeepSpeedConfig(zero_stage=1, offload_optimizer=True),
    "z2": DeepSpeedConfig(zero_stage=2, gradient_checkpointing=True),
    "z3": DeepSpeedConfig(zero_stage=3),
    "z3-offload": DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True),
}


@pytest.mark.parametrize(
    "layout",
    ["z0", "z3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("z1-offload", "z2", "z3-offload"))],
)
def test_a_checkpoint_of_any_layout_is_the_same_file_and_resumes_in_any_other(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    first = Engine(load_policy(tiny_model, LAYOUTS["z0"]), optimizer=OPTIMIZER, config=LAYOUTS["z0"])
    train(first, 2)
    first.save(tmp_path, tag="before", state={"version": 7})
    expected = train(first, 2)
    other = OPTIMIZER.model_copy(update={"lr": 0.5})
    second = Engine(load_policy(tiny_model, LAYOUTS[layout]), optimizer=other, config=LAYOUTS[layout])
    assert second.fits(tmp_path, tag="before") and second.load(tmp_path, tag="before") == {"version": 7}
    second.save(tmp_path, tag="after", state={"version": 7})
    before, after = (load_file(tmp_path / f"{tag}.safetensors") for tag in ("before", "after"))
    assert before.keys() == after.keys() and len(before) == 3 * len(list(second.module.parameters()))
    assert all(torch.equal(before[name], after[name]) for name in before)
    third = Engine(load_policy(tiny_model, LAYOUTS[layout]), optimizer=OPTIMIZER, config=LAYOUTS[layout])
    third.load(tmp_path, tag="after")
    assert train(third, 2) == pytest.approx(expected, rel=1e-4)
    assert (weights(third) - weights(first)).abs().max() < 2e-5
    for engine in (first, second, third):
        engine.close()


def test_a_checkpoint_that_is_missing_or_of_another_model_is_refused_by_the_name_of_what_differs(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = DeepSpeedConfig(zero_stage=1)
    policy = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    critic = Engine(load_critic(tiny_model, config), optimizer=OPTIMIZER, config=config)
    policy.save(tmp_path, tag="policy", state={})
    assert policy.fits(tmp_path, tag="policy") and not critic.fits(tmp_path, tag="policy")
    assert not critic.fits(tmp_path, tag="critic")
    with pytest.raises(ValueError, match=r"head.bias is not there, wanted \(1,\)"):
        critic.load(tmp_path, tag="policy")
    with pytest.raises(ValueError, match="holds no checkpoint of 'critic'"):
        critic.load(tmp_path, tag="critic")


@pytest.mark.parametrize("stage", [1, ZERO_3])
def test_bf16_weights_have_float32_masters_that_small_steps_add_up_in(
    tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    config, slow = DeepSpeedConfig(zero_stage=stage, bf16=True), OptimizerConfig(lr=1e-6)
    engine = Engine(load_policy(tiny_model, config), optimizer=slow, config=config)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    before = weights(engine)
    for i in range(4):
        train(engine, 1)
        engine.save(tmp_path, tag=f"step-{i}", state={})
    name = "master.model.model.embed_tokens.weight"
    masters = [load_file(tmp_path / f"step-{i}.safetensors")[name] for i in range(4)]
    assert {m.dtype for m in masters} == {torch.float32}
    # Four steps of 1e-6 each: weights of about 0.02 change by less than bf16 can say (6e-5), the masters by all of it.
    assert (masters[3] - masters[0]).abs().max() == pytest.approx(3e-6, rel=0.05)
    assert (weights(engine) != before).float().mean() < 0.1
    engine.close()


@pytest.mark.parametrize("stage", [0, ZERO_3])
def test_a_head_on_the_policys_trunk_is_in_its_checkpoint_and_not_in_its_weights(
    tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    config = DeepSpeedConfig(zero_stage=stage)
    module = load_policy(tiny_model, config)
    module.value_head = value_head(64, hidden_size=0, dtype=torch.float32)
    engine = Engine(module, optimizer=OPTIMIZER, config=config)
    logprobs, _, values = engine(batches(1)[0], with_values=True)
    engine.backward((values - 1).square().mean() - logprobs.mean(), is_last=True)
    assert engine.step().is_applied
    engine.save(tmp_path, tag="policy", state={})
    head = load_file(tmp_path / "policy.safetensors")["master.value_head.weight"]
    assert (head.shape, bool(head.any())) == ((1, 64), True)
    out = export_weights(engine, parent=tiny_model, out=tmp_path / "v1")
    names = read_safetensors_header(out / "model.safetensors").keys()
    assert names == read_safetensors_header(tiny_model / "model.safetensors").keys()
    engine.close()


@pytest.mark.parametrize("stage", [0, ZERO_3])
def test_a_frozen_critic_trains_and_stores_its_head_alone(tiny_model: Path, tmp_path: Path, stage: int) -> None:
    config, kind = DeepSpeedConfig(zero_stage=stage), CriticConfig(kind="frozen", hidden_size=8)
    engine = Engine(load_critic(tiny_model, config, kind), optimizer=OPTIMIZER, config=config)
    before = dict(engine.tensors(engine.module))
    batch = batches(1)[0]
    for _ in range(2):
        engine.backward((engine(batch) - 1).square().mean(), is_last=True)
        engine.step()
    changed = {name for name, x in engine.tensors(engine.module) if not torch.equal(x, before[name])}
    assert changed == {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}
    engine.save(tmp_path, tag="critic", state={})
    assert {name.partition(".")[2] for name in load_file(tmp_path / "critic.safetensors")} == changed
    engine.close()


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, ZERO_3])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_no_trace(tiny_model: Path, stage: int, bf16: bool) -> None:
    config = DeepSpeedConfig(zero_stage=stage, bf16=bf16)
    engine = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    before = weights(engine)
    first, second = batches(2)
    engine.backward(completion_logprobs(engine, first).sum(), is_last=False)
    engine.backward(completion_logprobs(engine, second).sum() * math.inf, is_last=True)
    assert not engine.step().is_applied
    assert torch.equal(weights(engine), before) and engine.num_steps == 0
    fresh = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    assert train(engine, 1) == train(fresh, 1)


@pytest.mark.parametrize(
    "config",
    [
        DeepSpeedConfig(bf16=True),
        DeepSpeedConfig(bf16=True, zero_stage=1, offload_optimizer=True),
        DeepSpeedConfig(bf16=True, zero_stage=3),
    ],
    ids=["z0", "z1-offload", "z3"],
)
def test_in_bf16_the_gradients_of_many_microbatches_add_up(config: DeepSpeedConfig) -> None:
    engine = Engine(torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16), optimizer=OPTIMIZER, config=config)
    for i in range(512):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum() / 512, is_last=i == 511)
    assert engine.step().grad_norm == pytest.approx(2.0)
    engine.close()


@pytest.mark.parametrize("stage", [0, ZERO_3])
def test_exported_weights_are_those_of_the_engine_with_the_tied_head_once(
    tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = DeepSpeedConfig(zero_stage=stage)
    engine = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    train(engine, 1)
    out = export_weights(engine, parent=tiny_model, out=tmp_path / "v1")
    header = read_safetensors_header(out / "model.safetensors")
    assert header == read_safetensors_header(tiny_model / "model.safetensors")
    assert "lm_head.weight" not in header
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(tiny_model))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), weights(engine))


@pytest.mark.parametrize("stage", [0, ZERO_3])
def test_a_tied_head_that_the_parent_stores_is_exported_as_the_embeddings(
    tiny_model: Path, tmp_path: Path, stage: int
) -> None:
    parent = with_stored_head(tiny_model, tmp_path / "v0")
    config = DeepSpeedConfig(zero_stage=stage)
    engine = Engine(load_policy(parent, config), optimizer=OPTIMIZER, config=config)
    train(engine, 1)
    file = export_weights(engine, parent=parent, out=tmp_path / "v1") / "model.safetensors"
    assert read_safetensors_header(file) == read_safetensors_header(parent / "model.safetensors")
    tensors = load_file(file)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert not torch.equal(tensors["lm_head.weight"], load_file(parent / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_a_folder_of_any_dtype_is_exported_in_the_dtype_that_trains(
    tiny_model: Path, tmp_path: Path, stored: str, bf16: bool
) -> None:
    from transformers import AutoModelForCausalLM

    parent, config = in_dtype(tiny_model, tmp_path / "v0", stored), DeepSpeedConfig(bf16=bf16)
    slow = OptimizerConfig(lr=1e-6)
    engine = Engine(load_policy(parent, config), optimizer=slow, config=config)
    before = weights(engine)
    train(engine, 2)
    out = export_weights(engine, parent=parent, out=tmp_path / "v1")
    header = read_safetensors_header(out / "model.safetensors")
    assert {dtype for dtype, _ in header.values()} == {"BF16" if bf16 else "F32"}
    # Read as anybody would, in the dtype that config.json names.
    loaded = AutoModelForCausalLM.from_pretrained(out)
    read = torch.cat([p.detach().flatten() for p in loaded.parameters()])
    assert read.dtype == (torch.bfloat16 if bf16 else torch.float32) and torch.equal(read, weights(engine))
    # Steps of 1e-6 move nearly every float32 weight, and few in bfloat16.
    assert (read != before).float().mean() > 0.9 or bf16
    engine.close()


def test_policy_and_critic_train_side_by_side(tiny_model: Path) -> None:
    config = DeepSpeedConfig()
    policy = Engine(load_policy(tiny_model, config), optimizer=OPTIMIZER, config=config)
    critic = Engine(load_critic(tiny_model, config), optimizer=OPTIMIZER, config=config)
    before = weights(critic)
    train(policy, 1)
    assert torch.equal(weights(critic), before)
    batch = batches(1)[0]
    critic.backward((critic(batch) - 1).square().mean(), is_last=True)
    assert critic.step().is_applied and not torch.equal(weights(critic), before)


@pytest.mark.nightly
def test_an_engine_starts_and_steps_where_there_is_no_compiler(tiny_model: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from train_loops.config import *; from train_loops.engine.deepspeed_engine import *\n"
        "from train_loops.rows.batching import collate_turns\n"
        "join_workers()\n"
        "offload = DeepSpeedConfig(zero_stage=3, offload_optimizer=True, offload_parameters=True)\n"
        "for c in (DeepSpeedConfig(zero_stage=1), offload):\n"
        "    e = Engine(load_policy(sys.argv[1], c), optimizer=OptimizerConfig(), config=c)\n"
        "    e.backward(e(collate_turns([([1], [1, 1, 1])]))[0].sum(), is_last=True)\n"
        "    assert e.step().is_applied\n"
    )
    env = {"PATH": str(Path(sys.executable).parent), "HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "x")}
    env |= {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    subprocess.run([sys.executable, "-c", script, str(tiny_model)], env=env, check=True, timeout=300)
    assert not (tmp_path / "x").exists()
