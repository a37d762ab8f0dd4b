"""Which tensors a config leads to: those that transformers builds, for every family and in every wrapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stores.weights.decoder_shapes import FAMILIES, SIZES
from stores.weights.model_folder import check_model_files, check_shapes, knows_all_tensors
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
        (("self_attn",), "model.layers.0.self_attn.q_proj.weight"),
        (("k_norm",), "model.layers.0.self_attn.k_norm.weight"),
        (("layernorm",), "model.layers.0.input_layernorm.weight"),
        (("model.norm",), "model.norm.weight"),
        (("model.layers",), "model.layers.0."),
        (("embed_tokens",), "embed_tokens.weight"),
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
    with pytest.raises(ValueError, match=r"model.safetensors holds no embed_tokens.weight .*save_pretrained"):
        check_model_files(folder)


def test_an_optimizers_state_is_no_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    write_tensors(folder / WEIGHTS, {"exp_avg": [32]})
    with pytest.raises(
        ValueError, match=r"holds no embed_tokens.weight of a model of type qwen3, but 1 tensors like exp_avg"
    ):
        check_model_files(folder)
    change_json(folder / "config.json", model_type="gpt2")
    with pytest.raises(ValueError, match=r"vocab_size = 1024, and no tensor of the weights has a row for each token"):
        check_model_files(folder)


def test_a_norm_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, **{"model.layers.1.post_attention_layernorm.weight": [31]})
    with pytest.raises(
        ValueError, match=r"config.json says hidden_size = 32, so that model.layers.1.post.*\[32\].*\[31\]"
    ):
        check_model_files(folder)


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "pre_feedforward_layernorm.weight"])
def test_a_tensor_that_the_config_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, **{f"model.layers.0.{name}": [64]})
    with pytest.raises(ValueError, match=rf"holds model.layers.0.{name}, .* would be left out"):
        check_model_files(folder)


def test_a_buffer_of_an_older_save_is_no_fault(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": [8]})
    check_model_files(folder)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_the_config_does_not_name_is_refused(key: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", **{key: None})
    with pytest.raises(ValueError, match=rf"config.json has no {key}, for which transformers would take \d+: copy"):
        check_model_files(folder)


def test_a_type_that_nobody_knows_is_refused_and_one_that_is_not_known_here_is_not(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", model_type="nonsense")
    with pytest.raises(ValueError, match=r"config.json has model_type = 'nonsense', which .* cannot build: correct it"):
        check_model_files(folder)
    change_json(folder / "config.json", model_type="exaone4")
    assert not knows_all_tensors(check_model_files(folder))
    change_json(folder / "config.json", model_type="qwen3")
    assert knows_all_tensors(check_model_files(folder))


def test_a_head_that_a_type_has_by_default_is_missed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    change_json(folder / "config.json", tie_word_embeddings=None)
    with pytest.raises(ValueError, match=r"leaves it out for that default, but the weights hold no lm_head.weight"):
        check_model_files(folder)
    gemma = write_model(tmp_path / "gemma", "gemma")
    change_json(gemma / "config.json", tie_word_embeddings=None)
    check_model_files(gemma)


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_a_text_model_may_stand_alone_or_within_another(prefix: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mistral", tied=False)
    config = json.loads((folder / "config.json").read_text())
    tensors = {n.replace("model.", prefix, 1): shape for n, shape in tensors_of(config).items()}
    if "language" in prefix:
        (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
        tensors["vision_tower.layers.0.self_attn.q_proj.weight"] = [7, 7]
    write_tensors(folder / WEIGHTS, tensors)
    check_model_files(folder)
    write_tensors(folder / WEIGHTS, {n: shape for n, shape in tensors.items() if "layers.1.mlp.up" not in n})
    with pytest.raises(ValueError, match=r"model.safetensors does not hold .*layers.1.mlp.up_proj.weight"):
        check_model_files(folder)


def test_of_quantized_weights_the_norms_are_compared(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    change_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    rewrite(folder, without=("_proj.weight",), **{f"model.layers.{i}.mlp.up_proj.qweight": [4, 4] for i in (0, 1)})
    check_model_files(folder)
    rewrite(folder, without=("_proj.weight", "layers.1.input_layernorm"))
    with pytest.raises(ValueError, match=r"does not hold model.layers.1.input_layernorm.weight"):
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
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_the_tensors_are_those_that_transformers_builds(family: str, has_bias: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(family)
    assert tuple(getattr(default, key) for key in SIZES) == FAMILIES[family].sizes
    assert default.tie_word_embeddings == FAMILIES[family].is_tied
    default.save_pretrained(tmp_path)
    assert set(SIZES) <= json.loads((tmp_path / "config.json").read_text()).keys()
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "pad_token_id": 0,
    }
    for settings in ({}, {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False}):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **settings))
        tensors = {name: ("F32", tuple(value.shape)) for name, value in model.state_dict().items()}
        config = {"model_type": family, **sizes, **settings}
        check_shapes(tmp_path, config, tensors)
        for name in tensors.keys() - {"lm_head.weight"}:
            with pytest.raises(ValueError):
                check_shapes(tmp_path, config, {n: entry for n, entry in tensors.items() if n != name})
