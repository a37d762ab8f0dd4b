"""Weights are those that a model of their config needs, as transformers says, for every family and in every wrapping."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stores.weights import loading
from stores.weights.model_folder import check_model_files
from tests.model_folders import CONFIG, SHAPES, change_json, tensors_of, write_model, write_tensors

pytestmark = pytest.mark.fast

QWEN = {**CONFIG, **SHAPES["qwen"], "tie_word_embeddings": True}
WEIGHTS = "model.safetensors"


def rewrite(folder: Path, *, without: tuple[str, ...] = (), **tensors: list[int]) -> None:
    """Writes the tensors of `QWEN` but for those whose names hold a text of `without`, and others."""
    kept = {n: shape for n, shape in tensors_of(QWEN).items() if not any(text in n for text in without)}
    write_tensors(folder / WEIGHTS, {**kept, **tensors})


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (("layers.1.mlp.down_proj",), "model.layers.1.mlp.down_proj.weight"),
        (("self_attn",), "model.layers.0.self_attn.k_norm.weight"),
        (("k_norm",), "model.layers.0.self_attn.k_norm.weight"),
        (("layernorm",), "model.layers.0.input_layernorm.weight"),
        (("model.norm",), "model.norm.weight"),
        (("model.layers",), "model.layers.0."),
    ],
)
def test_a_tensor_that_is_missing_is_named_with_its_file(without: tuple[str, ...], named: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, without=without)
    with pytest.raises(ValueError) as caught:
        check_model_files(folder)
    said = str(caught.value)
    assert str(folder / WEIGHTS) in said and named in said and "copy" in said


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "x."])
def test_weights_under_foreign_names_are_refused(prefix: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    write_tensors(folder / WEIGHTS, {prefix + name: shape for name, shape in tensors_of(QWEN).items()})
    with pytest.raises(
        ValueError, match=r"model.safetensors does not hold model.embed.* but tensors like .*save_pretrained"
    ):
        check_model_files(folder)


@pytest.mark.parametrize(
    ("without", "tensors", "said"),
    [
        (("model",), {"exp_avg": [32]}, r"vocab_size = 1024, and no tensor of the weights has that dimension"),
        (
            (),
            {"model.layers.1.post_attention_layernorm.weight": [31]},
            r"config.json describes .* hidden_size = 32, .* so that model.layers.1.post.*\[32\].*\[31\]",
        ),
        ((), {"model.layers.0.self_attn.q_proj.bias": [64]}, "holds model.layers.0.self_attn.q_proj.bias, .* left out"),
        ((), {"model.layers.0.pre_feedforward_layernorm.weight": [64]}, "holds model.layers.0.pre_.*, .* left out"),
    ],
    ids=["an optimizer's state", "a norm of another shape", "a bias", "another norm"],
)
def test_tensors_that_are_not_those_of_the_config_are_refused(
    without: tuple[str, ...], tensors: dict[str, list[int]], said: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, without=without, **tensors)
    with pytest.raises(ValueError, match=said):
        check_model_files(folder)


def test_a_buffer_of_an_older_save_is_no_fault(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": [8]})
    check_model_files(folder)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_that_the_config_does_not_name_is_not_that_of_the_weights(key: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", **{key: None})
    with pytest.raises(ValueError, match=r"(config.json describes|does not hold).* copy config and weights from one"):
        check_model_files(folder)


def test_a_type_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", model_type="nonsense")
    with pytest.raises(
        ValueError, match=r"config.json: the installed transformers cannot build it .*`nonsense`.*: correct it"
    ):
        check_model_files(folder)
    change_json(folder / "config.json", model_type="qwen3")
    check_model_files(folder)


def test_a_head_that_a_type_has_by_default_is_missed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    change_json(folder / "config.json", tie_word_embeddings=None)
    with pytest.raises(
        ValueError, match=r"does not hold lm_head.weight \(or .*config.json must say tie_word_embeddings = true\)"
    ):
        check_model_files(folder)
    gemma = write_model(tmp_path / "gemma", "gemma")
    change_json(gemma / "config.json", tie_word_embeddings=None)
    check_model_files(gemma)


@pytest.mark.parametrize("family", ["llama", "olmo2", "granite", "gpt_neox", "gemma3_text", "gemma3"])
def test_the_tensors_of_any_family_are_known(family: str, tmp_path: Path) -> None:
    sizes = {name: size for name, size in CONFIG.items() if name != "eos_token_id"} | {"vocab_size": 300, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    is_inner = family == "gemma3"
    config = AutoConfig.for_model(family, **({"text_config": sizes, "vision_config": vision} if is_inner else sizes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    tensors = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    write_tensors(tmp_path / WEIGHTS, tensors)
    check_model_files(tmp_path)
    missing = next(name for name in tensors if "layers.1." in name and name.endswith("weight"))
    write_tensors(tmp_path / WEIGHTS, {name: shape for name, shape in tensors.items() if name != missing})
    with pytest.raises(ValueError, match=rf"model.safetensors does not hold .*{missing.partition('layers.')[2]}"):
        check_model_files(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"the weights are quantized \(gptq\), .*save_pretrained",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ({"quantization_config": {"load_in_4bit": True}}, r"quantized \(None\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"quantized \(awq\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"quantized \(compressed-tensors\)"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            r"architectures = Qwen3ForSequenceClassification: that model",
        ),
        ({"architectures": ["BertForMaskedLM"]}, r"architectures = BertForMaskedLM: .* does not continue a text"),
        (
            {"architectures": ["Qwen3Model"]},
            r"architectures = Qwen3Model: .* take the folder of the causal language model",
        ),
    ],
)
def test_a_folder_that_no_policy_can_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=said):
        check_model_files(folder)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"dtype": "F32", "shape": [1024, 32], "data_offsets": [0, 8]},
            "takes 131072 bytes, and the header gives it 8",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "numbers from 0 upwards"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, "numbers from 0 upwards"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "numbers from 0 upwards"),
        ({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}, "the dtype 'F31'"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "the dtype"),
        ("F32", "numbers from 0 upwards"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at byte 4, the one before it ends at 0"),
    ],
)
def test_a_header_that_its_bytes_cannot_hold_is_refused(entry: Any, said: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    text = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError) as caught:
        check_model_files(folder)
    assert f"{folder / WEIGHTS}: tensor model.embed_tokens.weight" in str(caught.value)
    assert said in str(caught.value) and "copy it again" in str(caught.value)


@pytest.mark.test
def test_a_process_that_has_no_transformers_asks_another_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, without=("k_norm",))
    here = loading.loading_faults(folder)
    monkeypatch.delitem(sys.modules, "transformers")
    assert (
        loading.loading_faults(folder)
        == here
        == loading.LoadingFaults(missing=[f"model.layers.{i}.self_attn.k_norm.weight" for i in (0, 1)])
    )
    monkeypatch.setattr(loading.subprocess, "run", None)
    assert loading.loading_faults(folder) == here


def test_without_transformers_sizes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    rewrite(folder, without=("k_norm",))
    check_model_files(folder)
    assert not loading.can_load()
    change_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ValueError, match="num_hidden_layers = 3, but the weights hold 2 layers"):
        check_model_files(folder)
