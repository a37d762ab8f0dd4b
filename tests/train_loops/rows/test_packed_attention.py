"""packed attention: a row sees itself only, positions restart, what cannot be packed is refused, nothing is T x T."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chained_samples import chained_samples, sample
from tiny_policy import policy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from train_loops.config import DeepSpeedConfig, OptimizerConfig
from train_loops.engine.critic import ValueModel
from train_loops.engine.deepspeed_engine import Engine, join_workers, load_policy
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs
from train_loops.rows.batching import Batch, collate, lift
from train_loops.rows.packed_attention import PACKED_ATTENTION, why_not_packed

pytestmark = pytest.mark.test

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def packed(rows: list[tuple[int, ...]]) -> Batch:
    return collate(chained_samples(), rows, pack=True)


def test_packed_rows_lie_end_to_end_with_positions_from_zero() -> None:
    samples = [sample("e", 0, [5, 6], [7]), sample("f", 0, [8], [9]), sample("g", 0, [1, 2], [3, 4])]
    batch = collate(samples, [(2,), (0,), (1,)], pack=True)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert (batch.predictors.tolist(), batch.targets.tolist()) == ([1, 2, 5, 7], [3, 4, 7, 9])
    assert (batch.row_of_token.tolist(), batch.rows) == ([0, 0, 1, 2], (2, 0, 1))
    assert batch.num_tokens == batch.token_ids.numel() == 9


@pytest.mark.parametrize(
    ("family", "said"), [("nemotron", "do not say which rows there are"), ("doge", "has a mask of its own")]
)
def test_a_model_whose_attention_does_not_hear_of_rows_fails(family: str, said: str) -> None:
    """Both go through transformers' AttentionInterface."""
    scorer = PolicyScorer(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)))
    assert not why_not_packed(scorer.model)
    completion_logprobs(scorer, collate(chained_samples(), [(7, 8), (9,)]))
    with pytest.raises(
        ValueError, match=rf"Attention cannot compute packed rows .*{said}; set train\.rows\.pack: false"
    ):
        completion_logprobs(scorer, packed([(7, 8), (9,)]))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_packed_row_never_attends_across(architecture: str) -> None:
    scorer = policy(architecture, torch.float32)
    batch = packed([(0, 1, 2), (7, 8), (9,), (10,)])
    assert batch.position_ids is not None
    changed = batch.token_ids.clone()
    start = int(batch.position_ids[0].diff().lt(0).nonzero()[0]) + 1  # of the second row
    changed[0, start : start + len(chained_samples()[8].token_ids)] = 7
    with torch.no_grad():
        before = lift(completion_logprobs(scorer, batch), batch)
        after = lift(completion_logprobs(scorer, replace(batch, token_ids=changed)), batch)
    assert [i for i in batch.rows if before[i].tolist() != after[i].tolist()] == [7, 8]


def test_packed_attention_equals_attention_under_a_block_diagonal_mask() -> None:
    batch = packed([(0, 1, 2), (5,), (6,), (7, 8), (9,)])
    scorer, plain = policy("qwen3", torch.float32), policy("qwen3", torch.float32)
    plain.model.set_attn_implementation("sdpa")
    assert batch.position_ids is not None
    row = batch.position_ids[0].eq(0).cumsum(0)
    mask = (row[:, None] == row) & torch.ones(len(row), len(row), dtype=torch.bool).tril()
    arguments = {"input_ids": batch.token_ids, "position_ids": batch.position_ids, "use_cache": False}
    with torch.no_grad():
        got = scorer.model(**arguments, families=batch.families).logits
        expected = plain.model(**arguments, attention_mask=mask[None, None]).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_longest_tensor_of_a_packed_pass_grows_with_the_tokens_not_with_their_square() -> None:
    samples = [sample(f"e{i}", 0, [3] * (20 + i), [4] * 20) for i in range(40)]
    batch = collate(samples, [(i,) for i in range(40)], pack=True)
    num_tokens = batch.token_ids.numel()
    sizes: list[int] = []
    with torch.no_grad(), Sizes(sizes):
        policy("qwen3", torch.float32).model.get_decoder()(
            input_ids=batch.token_ids, position_ids=batch.position_ids, families=batch.families, use_cache=False
        )
    assert num_tokens**2 > max(sizes)


class Sizes(TorchDispatchMode):
    """Notes the number of elements of every tensor that is made."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        self._sizes += [x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        return out


def test_an_attention_mask_of_padding_is_still_honoured() -> None:
    scorer, plain = policy("llama", torch.float32), policy("llama", torch.float32)
    plain.model.set_attn_implementation("sdpa")
    token_ids = torch.arange(3, 13)[None].repeat(2, 1)
    mask = torch.ones_like(token_ids)
    mask[0, :4] = 0
    with torch.no_grad():
        got, expected = (m.model(input_ids=token_ids, attention_mask=mask).logits for m in (scorer, plain))
    torch.testing.assert_close(got[:, 4:], expected[:, 4:])


def test_models_with_windows_are_trained_unpacked_and_refused_packed() -> None:
    samples = chained_samples()
    window = {"sliding_window": 4, "max_position_embeddings": 64}
    qwen = Qwen3Config(**SMALL, **window, use_sliding_window=True, max_window_layers=0)
    for model, reason in (
        (MistralForCausalLM(MistralConfig(**SMALL, **window)), "sliding"),
        (Qwen3ForCausalLM(qwen), "layers of sliding_attention"),
    ):
        scorer = PolicyScorer(model)
        assert reason in why_not_packed(model)
        assert model.config._attn_implementation != PACKED_ATTENTION
        padded = collate(samples, [(2,), (9,)])
        assert completion_logprobs(scorer, padded).isfinite().all()
        with pytest.raises(ValueError, match=r"cannot compute packed rows.*sliding.*train\.rows\.pack: false"):
            completion_logprobs(scorer, collate(samples, [(2,), (9,)], pack=True))


def test_a_model_with_pictures_is_looked_at_in_its_text_config() -> None:
    text = SMALL | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"image_token_index": 299, "boi_token_index": 297, "eoi_token_index": 298}
    pictures = {"vision_config": vision | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4, **special}
    model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, **pictures)).eval()
    scorer = PolicyScorer(model)
    assert "layers of sliding_attention" in why_not_packed(model)
    rows = sample("e", 0, list(range(3, 33)), list(range(40, 50)))
    with torch.no_grad():
        got = completion_logprobs(scorer, collate([rows], [(0,)]))
        want = model(input_ids=torch.tensor([rows.token_ids])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(got, want[29:39].gather(1, torch.arange(40, 50)[:, None])[:, 0], atol=1e-5, rtol=0)
    assert ValueModel(model.model).head.in_features == SMALL["hidden_size"]


def test_a_model_folder_does_not_name_the_packed_attention(tmp_path: Path) -> None:
    scorer = policy("qwen3", torch.float32)
    assert scorer.model.config._attn_implementation == PACKED_ATTENTION
    scorer.model.save_pretrained(tmp_path)
    assert PACKED_ATTENTION not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_packed_rows_learn_under_deepspeed_as_padded_ones_do(tiny_model: Path, zero_stage: int) -> None:
    join_workers()
    samples = chained_samples()
    config = DeepSpeedConfig(zero_stage=zero_stage, gradient_checkpointing=True)  # type: ignore[arg-type]
    norms = []
    for chains, pack in (([(i,) for i in range(len(samples))], False), ([(0, 1, 2), (3, 5), (7, 8), (9,)], True)):
        engine = Engine(load_policy(tiny_model, config), optimizer=OptimizerConfig(lr=1e-3), config=config)
        kept = [chain for chain in chains if set(chain) <= {0, 1, 2, 3, 5, 7, 8, 9}]
        for rows in (kept, []):
            batch = collate(samples, rows, pack=pack)
            engine.backward(completion_logprobs(engine, batch).sum() / 50, is_last=not rows)  # type: ignore[arg-type]
        norms.append(engine.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
