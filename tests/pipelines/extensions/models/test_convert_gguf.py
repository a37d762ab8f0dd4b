"""`troupe model convert` and `check`: a GGUF file becomes a folder that transformers and Troupe read, and that says its numbers."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from pipelines.extensions.models.convert import convert_gguf

pytestmark = pytest.mark.test

HIDDEN, HEADS, KEY_HEADS, INNER, LAYERS = 32, 4, 2, 64, 2
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "th"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)


def write_gguf(file: Path, *, template: str = TEMPLATE, arch: str = "llama") -> dict[str, np.ndarray]:
    """Writes a tiny Llama with random weights and tied embeddings, one matrix quantized; returns its tensors by their name in GGUF."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if template:
        writer.add_chat_template(template)
    keys = HIDDEN // HEADS * KEY_HEADS
    shapes = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (keys, HIDDEN),
            f"blk.{layer}.attn_v.weight": (keys, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        if name.endswith("ffn_up.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quantize(values, kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
            tensors[name] = gguf.dequantize(blocks, kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_has_the_numbers_of_the_file(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    from pipelines.extensions.models.check import ask_model
    from pipelines.runners.model_folder import check_model_folder

    wanted = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "tiny"
    assert convert_gguf(tmp_path / "tiny.gguf", folder, dtype=dtype) == []  # type: ignore[arg-type]
    found = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {getattr(torch, dtype)}
    assert "lm_head.weight" not in found, "tied"
    for name, of in (("token_embd", "embed_tokens"), ("blk.1.ffn_up", "layers.1.mlp.up_proj")):
        numbers = torch.from_numpy(np.array(wanted[f"{name}.weight"])).to(getattr(torch, dtype))
        assert torch.equal(found[f"model.{of}.weight"], numbers), name
    shape = check_model_folder(folder).shape
    assert shape["dtype"] == dtype and "quantization_config" not in shape
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == stat.S_IMODE(
        (folder / "config.json").stat().st_mode
    )
    answers = ask_model(folder)
    assert answers.num_rows == len(WORDS) and answers.num_tokens > 300
    # Random weights know no order of words, and are a little worse than guessing or a little better.
    assert len(WORDS) / 2 < answers.perplexity < len(WORDS) * 2
    assert abs(answers.shuffled_perplexity / answers.perplexity - 1) < 0.2
    assert not answers.judgement().startswith("sane")


def test_a_file_without_a_chat_template_says_so_and_is_converted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", template="")
    (note,) = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert "chat template" in note and str(tmp_path / "tiny") in note and "unfinished" not in note
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


def test_a_type_that_transformers_does_not_read_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", arch="plamo")
    with pytest.raises(ValueError, match=r"tiny\.gguf: transformers cannot read this GGUF file .*plamo"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("data", "message"), [(None, "does not exist"), (b"PK\x03\x04 zip", "is no GGUF file: it does not begin with GGUF")]
)
def test_what_is_no_gguf_file_is_refused_before_torch_is_loaded(
    tmp_path: Path, data: bytes | None, message: str
) -> None:
    file = tmp_path / "model.gguf"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
