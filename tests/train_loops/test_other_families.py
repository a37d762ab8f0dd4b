"""Families whose files name other tensors than the model that transformers makes of them, and families that cannot be trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from stores.weights.manifest import Probe, tensors_of
from stores.weights.store import WeightStore
from tests.small_tokenizers import build
from train_loops.config import DeepSpeedConfig, LoraConfig, OptimizerConfig
from train_loops.engine.adapters import load_adapted, make_adapter, merge_adapter
from train_loops.engine.deepspeed_engine import Engine, load_policy
from train_loops.engine.export import export_weights
from train_loops.engine.logprobs import probe_logprobs
from train_loops.engine.warmstart import adopt, make_probe
from train_loops.rows.batching import collate_turns

pytestmark = [pytest.mark.test, pytest.mark.usefixtures("one_worker")]

SEQUENCES = [list(range(3, 23)), list(range(30, 39))]
SIZES = {
    **{
        "vocab_size": 1024,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PICTURES = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
GPT2 = {"vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
RENAMED: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {**SIZES, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt2": GPT2,
    "gpt_neox": SIZES,
    "mixtral": {**SIZES, **EXPERTS},
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gemma3": {
        "text_config": {**SIZES, "layer_types": ["full_attention"] * 2},
        "vision_config": PICTURES,
        "mm_tokens_per_image": 4,
    },
}
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "falcon_h1": {
        **{**SIZES, "lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        **{"mamba_d_state": 8, "mamba_n_groups": 1},
    },
    "gemma2": SIZES,
    "gpt_oss": {**SIZES, **EXPERTS},
    "granite": {**SIZES, "logits_scaling": 8.0},
    "llama4": {"text_config": {**SIZES, **EXPERTS}, "vision_config": PICTURES},
}


def write_folder(model_type: str, settings: Mapping[str, Any], folder: Path) -> Path:
    """Writes an untrained folder, large enough weights that a cap on its logits shows."""
    build("qwen", folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def without_prefix(folder: Path) -> Path:
    """Renames the tensors as openai-community/gpt2 is published, with a buffer that is no parameter."""
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor.clone() for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", RENAMED)
def test_a_family_whose_tensors_are_renamed_trains_and_is_exported_under_its_own_names(
    family: str, stage: int, tmp_path: Path
) -> None:
    folder = write_folder(family, RENAMED[family], tmp_path / "v0")
    if family == "gpt2":
        without_prefix(folder)
    adopt(folder, store=WeightStore(str(tmp_path / "w")), model_group="g", run_id="r", sequences=SEQUENCES)
    config = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type]
    engine = Engine(load_policy(folder, config), optimizer=OptimizerConfig(lr=1e-2), config=config)
    engine.backward(-engine(collate_turns([(SEQUENCES[0][:4], SEQUENCES[0][4:])]))[0].sum(), is_last=True)
    assert engine.step().is_applied
    trained = probe_logprobs(engine, SEQUENCES)
    out = export_weights(engine, parent=folder, out=tmp_path / "v1")
    engine.close()
    names = [[file.name for file in path.glob("*.safetensors")] for path in (folder, out)]
    assert tensors_of(out, names[1]) == tensors_of(folder, names[0])
    assert_same(make_probe(AutoModelForCausalLM.from_pretrained(out).eval(), SEQUENCES), trained)


def test_an_adapter_of_a_family_whose_tensors_are_renamed_merges_into_its_own_names(tmp_path: Path) -> None:
    folder = write_folder("qwen3_moe", RENAMED["qwen3_moe"], tmp_path / "v0")
    lora = LoraConfig(rank=2, target_modules=("q_proj", "o_proj"))
    make_adapter(AutoModelForCausalLM.from_pretrained(folder), lora, seed=0, out=tmp_path / "a")
    out = merge_adapter(folder, tmp_path / "a", tmp_path / "merged")
    assert tensors_of(out, ["model.safetensors"]) == tensors_of(folder, ["model.safetensors"])
    adapted = load_adapted(folder, tmp_path / "a", DeepSpeedConfig()).eval()
    assert_same(
        make_probe(AutoModelForCausalLM.from_pretrained(out).eval(), SEQUENCES), probe_logprobs(adapted, SEQUENCES)
    )


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_trainer_cannot_score_is_not_adopted(family: str, tmp_path: Path) -> None:
    folder = write_folder(family, REFUSED[family], tmp_path / "v0")
    with pytest.raises(ValueError, match=r"v0 cannot be trained, take another base model: "):
        adopt(folder, store=WeightStore(str(tmp_path / "w")), model_group="g", run_id="r", sequences=SEQUENCES)


def test_a_folder_whose_names_transformers_would_not_write_is_not_adopted(tmp_path: Path) -> None:
    folder = write_folder("qwen3_moe", RENAMED["qwen3_moe"], tmp_path / "v0")
    file, layer = folder / "model.safetensors", "model.layers.0."
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()  # the experts of a layer as one tensor
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(layer)}
    tensors |= {name: tensor for name, tensor in loaded.items() if name.startswith(layer)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"v0 has no tensor 'model\.layers\.0\.mlp\.experts\.0\..* adopt what save_pretrained"
    ):
        adopt(folder, store=WeightStore(str(tmp_path / "w")), model_group="g", run_id="r", sequences=SEQUENCES)


def assert_same(probe: Probe, logprobs: tuple[tuple[float, ...], ...]) -> None:
    for a, b in zip(probe.logprobs, logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
