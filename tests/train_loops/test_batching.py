"""batching, logprobs, critic: how rows are padded, ordered, cut and dealt changes no number and no gradient."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from train_loops import logprobs as logprobs_module
from train_loops.batching import Batch, collate, deal_minibatches, lay, lift, microbatches, plan
from train_loops.critic import ValueModel, completion_values
from train_loops.logprobs import (
    PolicyScorer,
    completion_logprobs,
    completion_logprobs_and_entropy,
)
from train_loops.losses import Denominators, aggregate, ppo_clip, value_loss
from train_loops.rows import Sample

SHAPES = [(5, 3), (2, 7), (11, 1), (4, 4), (9, 6), (1, 2), (6, 5)]
"""(prompt, completion) lengths."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            episode_id=f"e{i}",
            group_id="g",
            task_id="t",
            agent="ab"[i % 2],
            turn_index=0,
            round_index=0,
            token_ids=rng.integers(3, 290, prompt + completion).tolist(),
            prompt_length=prompt,
            rollout_logprobs=(-rng.random(completion)).tolist(),
            reward=float(rng.normal()),
            temperature=[1.0, 0.7][i % 2],
            status="ok",
        )
        for i, (prompt, completion) in enumerate(SHAPES)
    ]


@pytest.fixture
def scorer(tiny_model: Path) -> PolicyScorer:
    return PolicyScorer(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


@pytest.fixture
def critic(tiny_model: Path) -> ValueModel:
    model = ValueModel.from_policy(tiny_model)
    torch.manual_seed(0)
    nn.init.normal_(model.head.weight)
    return model


def test_a_batch_masks_exactly_the_completion_targets(samples: list[Sample]) -> None:
    batch = collate(samples, [0, 2], pad_id=9)
    assert batch.token_ids.shape == (2, 12)
    assert batch.token_ids[0, 8:].tolist() == [9] * 4
    assert batch.loss_mask[0].tolist() == [False] * 4 + [True] * 3 + [False] * 4
    assert batch.token_ids[:, 1:][batch.loss_mask].tolist() == [*samples[0].token_ids[5:], samples[2].token_ids[-1]]


def test_lay_and_lift_are_inverse_and_a_scalar_fills_its_row(samples: list[Sample]) -> None:
    batch = collate(samples, [4, 1])
    per_row = {i: np.random.default_rng(i).random(SHAPES[i][1]).astype(np.float32) for i in (1, 4)}
    back = lift(lay(per_row, batch), batch)
    assert {i: x.tolist() for i, x in back.items()} == {i: x.tolist() for i, x in per_row.items()}
    filled = lift(lay([0.0, 2.5, 0.0, 0.0, -1.0], batch), batch)
    assert (filled[1].tolist(), filled[4].tolist()) == ([2.5] * 7, [-1.0] * 6)
    assert lift(lay(per_row, collate(samples, [])), collate(samples, [])) == {}


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 50), max_size=40),
    num_minibatches=st.integers(1, 5),
    budget=st.integers(1, 200),
    num_workers=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_workers_see_every_row_once_and_run_the_same_number_of_microbatches(
    lengths: list[int], num_minibatches: int, budget: int, num_workers: int, seed: int
) -> None:
    plans = [
        plan(
            lengths,
            num_minibatches=num_minibatches,
            microbatch_tokens=budget,
            num_workers=num_workers,
            rank=rank,
            seed=seed,
        )
        for rank in range(num_workers)
    ]
    rows = [row for p in plans for minibatch in p for micro in minibatch for row in micro]
    assert sorted(rows) == list(range(len(lengths)))
    dealt = deal_minibatches(len(lengths), num_minibatches, seed=seed)
    assert len(dealt) == min(num_minibatches, len(lengths))
    for k, minibatch in enumerate(zip(*plans, strict=True)):
        assert len({len(micros) for micros in minibatch}) == 1
        assert sorted(row for micros in minibatch for micro in micros for row in micro) == sorted(dealt[k])
        for micro in (micro for micros in minibatch for micro in micros if len(micro) > 1):
            assert len(micro) * max(lengths[row] for row in micro) <= budget
        sizes = [len(micro) for micros in minibatch for micro in micros]
        assert sizes.count(0) < num_workers
        assert 0 not in sizes or max(sizes) == 1, "empty ones only where nothing is left to split"


def test_minibatches_are_dealt_at_random_and_differ_by_at_most_one_row() -> None:
    one, other = deal_minibatches(100, 3, seed=0), deal_minibatches(100, 3, seed=1)
    assert [len(m) for m in one] == [34, 33, 33]
    assert one != other
    assert one == deal_minibatches(100, 3, seed=0)
    # Not sorted by length or by place: rows of the first half are in every minibatch.
    assert all(10 < sum(row < 50 for row in m) < 25 for m in one)
    assert deal_minibatches(0, 3, seed=0) == []


def test_a_row_longer_than_the_budget_is_a_microbatch_of_its_own() -> None:
    assert microbatches([0, 1, 2], [4, 100, 4], max_tokens=8) == [[1], [0, 2]]


def test_completion_logprobs_equal_those_of_the_whole_logits(scorer: PolicyScorer, samples: list[Sample]) -> None:
    batch = collate(samples, range(len(samples)))
    got, entropy = completion_logprobs_and_entropy(scorer, batch)
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    is_real = torch.arange(batch.token_ids.shape[1]) < lengths[:, None]
    logits = scorer.model(input_ids=batch.token_ids, attention_mask=is_real.long()).logits
    scaled = torch.log_softmax(logits[:, :-1] / batch.temperature[:, None, None], dim=-1)
    want = scaled.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(got, want * batch.loss_mask, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy, -(scaled.exp() * scaled).sum(-1) * batch.loss_mask, atol=2e-5, rtol=0)
    assert (entropy[batch.loss_mask] > 1).all()


def test_a_rows_logprobs_depend_neither_on_padding_nor_on_its_neighbours(
    scorer: PolicyScorer, samples: list[Sample]
) -> None:
    with torch.no_grad():
        batch = collate(samples, [3, 2, 0, 6], pad_id=17)
        together = lift(completion_logprobs(scorer, batch), batch)
        for row in (3, 2, 0, 6):
            alone = collate(samples, [row])
            np.testing.assert_allclose(lift(completion_logprobs(scorer, alone), alone)[row], together[row], atol=2e-6)


def gradient(
    model: nn.Module, loss_of: Callable[[Batch, Denominators], torch.Tensor], samples: list, cuts: list
) -> dict:
    denominators = Denominators.of([samples[row].completion_length for rows in cuts for row in rows])
    model.zero_grad()
    for rows in cuts:
        loss_of(collate(samples, rows), denominators).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


CUTS = {
    "another order": [[6, 2, 4, 0, 1, 5, 3]],
    "one row each": [[i] for i in range(7)],
    "by length, with empty ones": [[2, 4], [6, 0, 1], [3], [5], [], []],
}


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_cuts_padding_and_order_of_rows_change_no_gradient(
    scorer: PolicyScorer, critic: ValueModel, samples: list[Sample], mode: str
) -> None:
    advantages = [s.reward for s in samples]

    def policy_loss(batch: Batch, denominators: Denominators) -> torch.Tensor:
        logprobs, entropy = completion_logprobs_and_entropy(scorer, batch)
        # Old logprobs near the current ones, so that some tokens clip and most do not.
        old = logprobs.detach() + 0.3 * torch.sin(batch.token_ids[:, 1:].float())
        loss, _ = ppo_clip(logprobs, old, lay(advantages, batch), batch.loss_mask)
        return aggregate(loss - 0.01 * entropy, batch.loss_mask, mode=mode, denominators=denominators)

    def critic_loss(batch: Batch, denominators: Denominators) -> torch.Tensor:
        values = completion_values(critic, batch)
        loss, _ = value_loss(values, torch.zeros_like(values), lay(advantages, batch), batch.loss_mask, value_clip=0.5)
        return aggregate(loss, batch.loss_mask, mode=mode, denominators=denominators)

    for model, loss_of in ((scorer, policy_loss), (critic, critic_loss)):
        want = gradient(model, loss_of, samples, [list(range(7))])
        scale = max(g.abs().max().item() for g in want.values())
        assert scale > 1e-3
        for name, cuts in CUTS.items():
            got = gradient(model, loss_of, samples, cuts)
            for parameter, g in want.items():
                error = (got[parameter] - g).abs().max().item() / scale
                assert error < 3e-6, f"{name}: {parameter} differs by {error:.1e} of the largest gradient"


def test_chunks_of_the_head_change_neither_logprobs_nor_gradients(
    scorer: PolicyScorer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss_of(batch: Batch, denominators: Denominators) -> torch.Tensor:
        logprobs, entropy = completion_logprobs_and_entropy(scorer, batch)
        return aggregate(logprobs + entropy, batch.loss_mask, mode="token_mean", denominators=denominators)

    want = gradient(scorer, loss_of, samples, [list(range(7))])
    with torch.no_grad():
        whole = completion_logprobs_and_entropy(scorer, collate(samples, range(7)))
    monkeypatch.setattr(logprobs_module, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(logprobs_module, "SCORING_CHUNK_TOKENS", 3)
    got = gradient(scorer, loss_of, samples, [list(range(7))])
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(completion_logprobs_and_entropy(scorer, collate(samples, range(7))), whole)


def test_an_empty_microbatch_gives_every_parameter_a_gradient_of_zero(
    scorer: PolicyScorer, critic: ValueModel, samples: list[Sample]
) -> None:
    empty = collate(samples, [], pad_id=5)  # 0 is the pad token, whose embedding is zero: it would hide a gradient
    completion_logprobs(scorer, empty).sum().backward()
    completion_values(critic, empty).sum().backward()
    for name, p in [*scorer.named_parameters(), *critic.named_parameters()]:
        assert p.grad is not None, name
        assert p.grad.abs().max() == 0, name


def test_a_model_whose_logits_are_not_its_head_is_refused(scorer: PolicyScorer) -> None:
    scorer.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping=30"):
        PolicyScorer(scorer.model)


def test_a_fresh_critic_values_everything_at_zero(tiny_model: Path, critic: ValueModel, samples: list[Sample]) -> None:
    batch = collate(samples, range(7))
    assert completion_values(ValueModel.from_policy(tiny_model), batch).abs().max() == 0
    values = completion_values(critic, batch)
    assert values[batch.loss_mask].std() > 0.1
    assert values[~batch.loss_mask].abs().max() == 0


def test_a_value_is_known_before_its_token_is_sampled(critic: ValueModel, samples: list[Sample]) -> None:
    batch = collate(samples, [1])
    values = completion_values(critic, batch)
    changed = batch.token_ids.clone()
    changed[0, 5:] = 3  # tokens 5.. are the outcomes of positions 4..
    after = critic(changed, batch.loss_mask)
    torch.testing.assert_close(after[0, :5], values[0, :5])
    assert (after[0, 5:] != values[0, 5:]).any()
