"""What `troupe validate` says of a model's dtypes, bytes and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.extensions.model_plan import plan as model_plan
from pipelines.extensions.model_plan.plan import GIB, ModelPlan, plan, plan_lines
from pipelines.runners.validate import check
from stores.weights.model_folder import read_config, read_tensors
from tests.model_folders import change_json, write_model

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[4] / "infra" / "runs" / "demo.yaml"
GROUP = "solver_verifier"
AGENTS = {"a": ["solver", "verifier"], "b": ["refiner", "finalizer"]}
NUM = 57_568
"""1024 x 32 embeddings and, in each of 2 layers, 4 x 16 wide queries, 2 x 16 wide keys and values, 64 wide MLP, norms."""


def config_of(folder: Path, **changes: Any) -> RunConfig:
    models = {f"model_groups.{group}.model": str(folder) for group in (GROUP, "refiner_finalizer")}
    return load_config(DEMO, {**models, "warmstart.tiny_model": None, **changes})


def planned(folder: Path, **changes: Any) -> ModelPlan:
    return plan(config_of(folder, **changes), GROUP, read_config(folder), read_tensors(folder))


BF16 = {"train.deepspeed.bf16": True, "serve.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "changes", "dtypes", "version_bytes"),
    [
        ("F32", {}, ("float32", "float32", "float32"), 4 * NUM),
        ("BF16", {}, ("bfloat16", "float32", "float32"), 4 * NUM),
        ("BF16", BF16, ("bfloat16", "bfloat16", "bfloat16"), 2 * NUM),
        ("BF16", {"serve.dtype": "auto"}, ("bfloat16", "float32", "bfloat16"), 4 * NUM),
    ],
)
def test_a_version_takes_what_the_trainers_dtype_takes(
    dtype: str, changes: dict[str, Any], dtypes: tuple[str, str, str], version_bytes: int, tmp_path: Path
) -> None:
    found = planned(write_model(tmp_path, dtype=dtype), **changes)
    assert (found.folder_dtype, found.trainer_dtype, found.engine_dtype) == dtypes
    assert (found.num_parameters, found.num_trained) == (NUM, NUM)
    per_checkpoint = 12 if found.trainer_dtype == "bfloat16" else 8  # a version in float32 holds the weights
    assert (found.version_bytes, found.checkpoint_bytes) == (version_bytes, per_checkpoint * NUM)


def test_a_head_stored_beside_the_embeddings_it_is_tied_to_is_no_parameter(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tied=False)
    assert planned(folder).num_parameters == NUM + 1024 * 32
    change_json(folder / "config.json", tie_word_embeddings=True)
    assert planned(folder).num_parameters == NUM


def test_an_adapter_alone_is_stored_and_its_base_served_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype="BF16")
    group = {"base": "shared", "model": str(folder)}
    groups = {
        "one": {"agents": ["solver", "verifier"], **group},
        "two": {"agents": ["refiner", "finalizer"], **group},
    }
    lora = {"rank": 4, "target_modules": ["q_proj", "up_proj"]}
    config = load_config(DEMO, {"model_groups": groups, "train.lora": lora, "warmstart": None})
    shape, tensors = read_config(folder), read_tensors(folder)
    found = plan(config, "one", shape, tensors)
    trained = 2 * 4 * ((64 + 32) + (64 + 32))
    assert (found.num_trained, found.version_bytes, found.checkpoint_bytes) == (trained, 4 * trained, 12 * trained)
    lines = plan_lines(config, {name: (shape, tensors) for name in groups})
    assert "(0.0M trained)" in lines[0] and "engines about" in lines[0] and "engines shared with its base" in lines[1]


def test_memory_grows_with_what_is_held(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    least = planned(folder)
    assert least.engine_bytes == 8 * NUM + int((1.5 + 0.5) * GIB)
    assert planned(folder, **{"serve.num_replicas": 3}).engine_bytes == 3 * least.engine_bytes
    own = planned(folder, **{"train.algorithm": "ppo"})
    assert own.trainer_bytes - least.trainer_bytes == 16 * NUM and own.checkpoint_bytes == 20 * NUM
    reference = planned(folder, **{"train.loss.kl_in_loss_coef": 0.1})
    assert reference.trainer_bytes - least.trainer_bytes == 4 * NUM
    two = planned(folder, **{"train.num_workers": 2})
    split = planned(folder, **{"train.num_workers": 2, "train.deepspeed.zero_stage": 3})
    # 2 x 16 bytes each whole; 16 bytes, and the masters that ZeRO keeps, between the two.
    assert two.trainer_bytes - split.trainer_bytes == (32 - 20) * NUM


def test_validate_says_the_plan_and_that_the_machine_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, dtype="BF16", hidden_size=128, head_dim=32)
    models = {name: {"agents": agents, "model": str(folder)} for name, agents in AGENTS.items()}
    config = load_config(DEMO, {"model_groups": models, "warmstart": None})
    monkeypatch.setattr(model_plan, "memory_bytes", lambda: 100 * GIB)
    lines = check(config)
    plans = [line for line in lines if "parameters; folder" in line]
    assert [line.partition(":")[0] for line in plans] == ["model_groups.a", "model_groups.b"]
    assert ": 0.3M parameters; folder bfloat16, trainer float32, engine float32; 1 MB per version, 2 MB" in plans[0]
    assert lines[-1].startswith("memory: engines and trainers take about ") and lines[-1].endswith("has 100.0 GiB")
    assert not any("rounds" in line for line in lines)
    rounded = load_config(DEMO, {"model_groups": models, "warmstart": None, "serve.dtype": "bfloat16"})
    assert sum("the engine rounds float32 weights to bfloat16 (serve.dtype)" in line for line in check(rounded)) == 2
    monkeypatch.setattr(model_plan, "memory_bytes", lambda: GIB)
    assert "this machine has 1.0 GiB, too little: lower serve.kv_cache_gib" in check(config)[-1]
    gpus = load_config(DEMO, {"model_groups": models, "warmstart": None, "serve.gpus": 1})
    assert not any(line.startswith("memory:") for line in check(gpus)), "what a GPU has is not known here"
