"""What `troupe validate` says of a model's dtypes, bytes and memory, and of rows that a model cannot have packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.runners import model_plan
from pipelines.runners.model_plan import GIB, ModelPlan, plan, plan_lines
from pipelines.runners.validate import check
from serve_apps.config import CPU_HEAD_SIZES
from stores.weights.model_folder import read_config, read_tensors, why_windowed
from tests.model_folders import change_json, write_model

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml"
GROUP = "solver_verifier"
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


GPU = {"serve.gpus": 1}
AGENTS = {"a": ["solver", "verifier"], "b": ["refiner", "finalizer"]}
KINDS = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"layer_types": ["full_attention"] * 2, "sliding_window": 8}, ""),
    "gemma 3": ({"model_type": "gemma3_text", "layer_types": KINDS}, "layers of sliding_attention"),
    "gemma 3 of the first day": ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, "type gemma3_text"),
    "gemma 3 with pictures": ({"model_type": "gemma3", "text_config": {"layer_types": KINDS}}, "sliding_attention"),
    "mistral 7B 0.1": ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
    "mistral 7B 0.2": ({"model_type": "mistral", "sliding_window": None}, ""),
    "qwen2.5": ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}, ""),
    "qwen2 with windows": ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "= 8"),
    "llama": ({"model_type": "llama"}, ""),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_layers_with_windows_are_known_by_the_config(case: str) -> None:
    config, said = WINDOWS[case]
    assert (said in why_windowed(config)) if said else (why_windowed(config) == "")


def test_rows_of_a_model_with_windows_are_padded_and_packing_them_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gemma")
    lines = [line for line in check(config_of(folder, **GPU)) if "padded, not packed" in line]
    assert len(lines) == 2 and all("train.rows.pack" in line and "gemma2" in line for line in lines)
    with pytest.raises(ValueError, match=r"train\.rows\.pack = true, but .*sliding_attention.*set it to auto or false"):
        check(config_of(folder, **GPU | {"train.rows.pack": True}))
    assert not any("packed" in line for line in check(config_of(folder, **GPU | {"train.rows.pack": False})))
    other = write_model(tmp_path / "qwen", "qwen")
    assert not any("packed" in line for line in check(config_of(other, **GPU | {"train.rows.pack": True})))
    assert json.loads(config_of(other, **GPU).model_dump_json())["train"]["rows"]["pack"] == "auto"


@pytest.mark.nightly
def test_heads_that_a_cpu_engine_does_not_take_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=16)
    with pytest.raises(
        ValueError, match=rf"{GROUP}\.model: its attention heads have 16 numbers .* takes 32, 64.*serve\.gpus: 1"
    ):
        check(config_of(folder))
    check(config_of(folder, **GPU))


@pytest.mark.nightly
def test_the_sizes_of_heads_are_those_of_the_engine() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
