"""Rows of a vocabulary that stand for no token: they are counted, never sampled, and no part of the policy that is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_policy import policy

from serve_apps.config import ServeConfig
from serve_apps.engines.vllm.settings import PADDED_ROWS, engine_arguments
from stores.weights.model_folder import num_known_rows, vocabulary_rows
from train_loops.engine.logprobs import PolicyScorer
from train_loops.rows.batching import collate_turns

pytestmark = pytest.mark.fast

TURNS = [([5, 6, 7], [8, 9, 10]), ([11, 12], [3, 4])]


def folder_of(tmp_path: Path, *, num_rows: int) -> Path:
    """Two words and a special token, ids 0 to 2."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": [{"id": 2, "content": "</s>"}]})
    )
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": num_rows}))
    return tmp_path


@pytest.mark.parametrize(("num_rows", "known", "padded"), [(3, None, 0), (2, None, 0), (64, 3, 61)])
def test_padded_rows_are_counted(num_rows: int, known: int | None, padded: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_rows=num_rows)
    vocabulary = vocabulary_rows(folder)
    assert vocabulary is not None and (vocabulary.num_padded, vocabulary.num_tokens) == (padded, 3)
    assert num_known_rows(folder) == known
    (folder / "tokenizer.json").unlink()
    assert num_known_rows(folder) is None


def test_an_engine_masks_padded_rows_where_there_are_some(tmp_path: Path) -> None:
    assert "logits_processors" not in engine_arguments(ServeConfig(), folder_of(tmp_path, num_rows=3))
    padded = folder_of(tmp_path, num_rows=64)
    assert engine_arguments(ServeConfig(), padded)["logits_processors"] == [PADDED_ROWS]
    own = ServeConfig(engine={"logits_processors": ["a.b:C"]})
    assert engine_arguments(own, padded)["logits_processors"] == [PADDED_ROWS, "a.b:C"]


def test_logprobs_and_entropy_are_those_of_the_masked_distribution() -> None:
    scorer = policy("qwen3", torch.float32)
    num_rows = scorer.model.config.vocab_size
    scorer.num_known = num_known = num_rows - 40
    batch = collate_turns(TURNS)
    logprobs, entropy, _ = scorer(batch, with_entropy=True)
    expected, expected_entropy = [], []
    for prompt, completion in TURNS:
        logits = scorer.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
        logits[:, num_known:] = -float("inf")  # as PaddedRows does
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected += [rows[i, token] for i, token in enumerate(completion)]
        known = rows[:, :num_known]
        expected_entropy += [*-(known.exp() * known).sum(-1)]
    torch.testing.assert_close(logprobs, torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.stack(expected_entropy), atol=1e-5, rtol=1e-5)
    whole = scorer(batch, with_padded_rows=True)[0]
    assert (whole < logprobs).all(), "over all rows each token has less probability"


def test_a_padded_row_of_the_head_has_no_gradient() -> None:
    scorer = policy("llama", torch.float32)
    scorer.num_known = scorer.model.config.vocab_size - 40
    scorer(collate_turns(TURNS))[0].sum().backward()
    gradient = scorer.model.get_output_embeddings().weight.grad
    assert gradient is not None and gradient[: scorer.num_known].any() and not gradient[scorer.num_known :].any()


def test_a_padded_token_in_a_completion_is_refused() -> None:
    scorer = policy("qwen3", torch.float32)
    scorer.num_known = 10
    with pytest.raises(ValueError, match=r"a completion holds token id 10, but the tokenizer's ids end at 9"):
        scorer(collate_turns([([1], [10])]))


@pytest.mark.test
def test_the_engines_mask_hides_rows_behind_the_last_token(tmp_path: Path) -> None:
    from serve_apps.engines.vllm.inside import PaddedRows

    def mask(folder: Path) -> PaddedRows:
        return PaddedRows(SimpleNamespace(model_config=SimpleNamespace(model=str(folder))), None, False)

    logits = mask(folder_of(tmp_path, num_rows=6)).apply(torch.zeros(2, 6))
    assert logits.tolist() == [[0.0, 0.0, 0.0, -float("inf"), -float("inf"), -float("inf")]] * 2
    assert mask(folder_of(tmp_path, num_rows=3)).apply(torch.zeros(2, 3)).isfinite().all()


@pytest.mark.test
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_trainer_reads_padded_rows_from_the_folder(is_adapter: bool, tiny_model: Path, tmp_path: Path) -> None:
    from train_loops.config import DeepSpeedConfig, LoraConfig
    from train_loops.engine.adapters import load_adapted, make_adapter
    from train_loops.engine.deepspeed_engine import load_model, load_policy

    plain = DeepSpeedConfig()
    adapter = make_adapter(load_model(tiny_model, plain), LoraConfig(rank=4, alpha=8), seed=1, out=tmp_path / "adapter")

    def load(folder: Path) -> PolicyScorer:
        return load_adapted(folder, adapter, plain) if is_adapter else load_policy(folder, plain)

    folder = shutil.copytree(tiny_model, tmp_path / "padded")
    model = load_model(tiny_model, plain)
    num_tokens = model.config.vocab_size
    model.resize_token_embeddings(num_tokens + 40, mean_resizing=False)
    model.save_pretrained(folder)
    padded, whole = load(folder), load(tiny_model)
    assert (padded.num_known, whole.num_known) == (num_tokens, None)
    assert padded.model.get_output_embeddings().weight.shape[0] == num_tokens + 40
    batch = collate_turns(TURNS)
    torch.testing.assert_close(padded(batch)[0], whole(batch)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"the tokenizer's ids end at {num_tokens - 1}"):
        padded(collate_turns([([1], [num_tokens])]))
