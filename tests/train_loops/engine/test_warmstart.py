"""The warm start: demonstrations are learnt, any folder can be the start, version 0 carries a probe."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from stored_head import with_stored_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from stores.weights.store import WeightStore
from train_loops.config import LoraConfig, OptimizerConfig, TinyModelConfig, WarmstartConfig
from train_loops.engine.adapters import make_adapter, merge_adapter
from train_loops.engine.tiny_model import build_tokenizer
from train_loops.engine.warmstart import _batches, adopt, make_probe, probe_sequences, warmstart

pytestmark = pytest.mark.test

SHAPE = TinyModelConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
CONFIG = WarmstartConfig(
    tiny_model=SHAPE,
    demonstrator="a:b",
    num_epochs=6,
    batch_turns=16,
    threads=1,
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5),
)
COPIES = [([10 + i % 40, 5], [10 + i % 40, 2]) for i in range(256)]
"""Say the first token again, then stop."""


def test_a_tiny_model_learns_its_demonstrations_and_can_be_loaded(tmp_path: Path) -> None:
    tokenizer, seen = build_tokenizer(["a b c 1 2 3"], vocab_size=300), []
    metrics = warmstart(
        COPIES,
        config=CONFIG,
        seed=0,
        out=tmp_path / "v0",
        tokenizer=tokenizer,
        progress=lambda step, num, loss: seen.append((step, num)),
    )
    assert metrics["warmstart/loss"] < 0.3 < metrics["warmstart/first_loss"]
    assert seen == [(i, 96) for i in range(1, 97)]
    assert metrics["warmstart/tokens"] == 256 * 4 * 6 and metrics["warmstart/completion_tokens"] == 256 * 2 * 6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v0").eval()
    with torch.no_grad():
        assert model(torch.tensor([[17, 5], [42, 5]])).logits[:, -1].argmax(-1).tolist() == [17, 42]
    assert AutoTokenizer.from_pretrained(tmp_path / "v0").chat_template


def test_short_completions_are_said_as_often_as_they_are_demonstrated_and_no_more(tmp_path: Path) -> None:
    short, long = ([10, 5], [20, 2]), ([10, 5], [30, *range(40, 60), 2])
    tokenizer = build_tokenizer(["a b c 1 2 3"], vocab_size=300)
    warmstart([short] * 160 + [long] * 240, config=CONFIG, seed=0, out=tmp_path / "v0", tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v0").eval()
    with torch.no_grad():
        first_token = model(torch.tensor([[10, 5]])).logits[0, -1].softmax(-1)
    assert first_token[20].item() == pytest.approx(0.4, abs=0.08) and first_token[30].item() == pytest.approx(
        0.6, abs=0.08
    )


def test_the_same_seed_gives_the_same_weights_and_a_folder_can_go_on(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["a b c 1 2 3"], vocab_size=300)
    for name in ("one", "two"):
        warmstart(COPIES[:64], config=CONFIG, seed=3, out=tmp_path / name, tokenizer=tokenizer)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    go_on = CONFIG.model_copy(update={"tiny_model": None})
    metrics = warmstart(COPIES, config=go_on, seed=0, out=tmp_path / "three", model_folder=tmp_path / "one")
    assert metrics["warmstart/first_loss"] < 5
    assert (tmp_path / "three" / "tokenizer.json").is_file()


def test_a_folder_whose_generation_config_transformers_would_not_write_can_go_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "vicuna")
    (folder / "generation_config.json").write_text(text := '{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}')
    go_on = CONFIG.model_copy(update={"tiny_model": None, "num_epochs": 1})
    warmstart(COPIES[:16], config=go_on, seed=0, out=tmp_path / "out", model_folder=folder)
    adapter = make_adapter(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(rank=2), seed=0, out=tmp_path / "a")
    for out in (tmp_path / "out", merge_adapter(folder, adapter, tmp_path / "merged")):
        assert (out / "generation_config.json").read_text() == text
        AutoModelForCausalLM.from_pretrained(out)


def test_every_demonstration_is_seen_once_per_epoch_with_little_padding() -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (1000,), generator=random).tolist()
    rows = [([1] * n, [2]) for n in lengths]
    batches = list(_batches(rows, config=CONFIG.model_copy(update={"num_epochs": 1}), seed=0))
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    padded = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    assert padded < 1.15 * sum(lengths)


def test_bad_demonstrations_are_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["a"], vocab_size=300)
    for demonstrations, message in (
        ([], "no demonstrations"),
        ([([1], [])], "demonstration 0"),
        ([([1] * 600, [1])], "601 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            warmstart(demonstrations, config=CONFIG, seed=0, out=tmp_path / "x", tokenizer=tokenizer)


def test_an_adopted_folder_is_version_0_with_a_probe_that_recognises_it(tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    ref = adopt(tiny_model, store=store, model_group="shared", run_id="run")
    manifest = store.manifest(ref)
    assert (ref.version, manifest.parent, manifest.checkpoint) == (0, None, "")
    store.verify(ref)
    model = AutoModelForCausalLM.from_pretrained(store.fetch(ref)).eval()
    assert make_probe(model, probe_sequences(tiny_model)) == manifest.probe
    assert adopt(tiny_model, store=store, model_group="shared", run_id="run") == ref


def test_versions_hold_the_model_alone_whatever_else_lies_in_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "clone")
    others = (
        ".git/lfs/objects/ab/cd",
        "onnx/model.onnx",
        "checkpoint-500/model.safetensors",
        "optimizer.pt",
        "tf_model.h5",
    )
    for name in (*others, "additional_chat_templates/tools.jinja", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    shutil.copyfile(folder / "model.safetensors", folder / "checkpoint-500" / "model.safetensors")
    (tmp_path / "link").symlink_to(folder)  # as Hugging Face's cache holds models
    store = WeightStore(str(tmp_path / "weights"))
    ref = adopt(tmp_path / "link", store=store, model_group="shared", run_id="run")
    kept = {path.name for path in tiny_model.iterdir()} | {"additional_chat_templates/tools.jinja", "LICENSE"}
    assert set(store.manifest(ref).files) == kept
    store.verify(ref)
    assert not any(path.is_symlink() for path in store.fetch(ref).rglob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_heads": 0}, "num_heads\n.*greater than or equal to 1"),
        ({"num_layers": 0}, "num_layers\n.*greater than or equal to 1"),
        ({"head_dim": 33}, "head_dim\n.*multiple of 2"),
        ({"vocab_size": 280}, "vocab_size\n.*greater than or equal to 300"),
    ],
)
def test_a_shape_that_no_model_has_is_refused_when_the_config_is_read(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModelConfig(**changes)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "config.json"), ("tokenizer*", "a tokenizer"), ("*.safetensors", "safetensors")],
)
def test_a_folder_that_is_no_model_is_not_adopted(tiny_model: Path, tmp_path: Path, missing: str, message: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    for file in folder.glob(missing):
        file.unlink()
    with pytest.raises(ValueError, match=f"lacks .*{message}"):
        adopt(folder, store=WeightStore(str(tmp_path / "weights")), model_group="shared", run_id="run")


def test_a_head_that_differs_from_the_embeddings_it_is_said_to_be_is_not_adopted(
    tiny_model: Path, tmp_path: Path
) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"tie_word_embeddings = true, but .*set it to false, or remove"):
        adopt(with_stored_head(tiny_model, tmp_path / "a", excess=1.0), store=store, model_group="shared", run_id="run")
    adopt(with_stored_head(tiny_model, tmp_path / "b"), store=store, model_group="shared", run_id="run")
