"""merging: which turns form one row, what that saves, and that neither it nor packing changes any gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from chained_samples import CHAINS, chained_samples, sample
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy
from torch import nn

from train_loops.config import RowsConfig
from train_loops.engine.critic import ValueModel
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs
from train_loops.rows.batching import Batch, collate, lay, lift, plan
from train_loops.rows.samples import Sample
from train_loops.rows.sharing import chains_of, neighbours, unique_shares
from train_loops.signal.losses import Aggregation, Denominators, aggregate

pytestmark = pytest.mark.fast

MODES = get_args(Aggregation)
WAYS = [
    RowsConfig(merge=merge, pack=pack, share=share)
    for merge in (False, True)
    for pack, share in ((False, False), (True, False), (True, True))
]
PLAIN = WAYS[0]


def test_turns_that_extend_each_other_exactly_form_chains() -> None:
    assert chains_of(chained_samples()) == CHAINS


def test_a_prompt_that_cuts_into_the_completion_or_changes_a_token_extends_nothing() -> None:
    first = sample("e", 0, [1, 2], [3, 4])
    assert chains_of([first, sample("e", 1, [1, 2, 3, 4], [5])]) == [(0, 1)]
    assert chains_of([first, sample("e", 1, [1, 2, 3], [4, 5])]) == [(0,), (1,)]
    assert chains_of([first, sample("e", 1, [1, 9, 3, 4, 5], [6])]) == [(0,), (1,)]
    assert chains_of([first, sample("e", 1, [1, 2, 3, 9, 5], [6])]) == [(0,), (1,)]
    assert chains_of([first, sample("f", 1, [1, 2, 3, 4, 5], [6])]) == [(0,), (1,)]


def test_a_turn_continues_the_longest_chain_that_it_extends() -> None:
    short, long = sample("e", 0, [1], [2]), sample("e", 1, [1, 2, 3, 4], [5])
    other = sample("e", 1, [9], [9])
    later = sample("e", 2, [1, 2, 3, 4, 5, 6], [7])
    assert chains_of([later, long, short, other]) == [(2, 1, 0), (3,)]


def test_token_ids_of_any_sequence_type_are_compared() -> None:
    first, second = sample("e", 0, [1, 2], [3]), sample("e", 1, [1, 2, 3], [4])
    assert chains_of([replace(first, token_ids=(1, 2, 3)), second]) == [(0, 1)]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 3), st.integers(1, 3)), max_size=12))
def test_every_sample_is_in_one_chain_and_its_row_begins_with_it(turns: list[tuple[int, int, int, int]]) -> None:
    samples: list[Sample] = []
    for turn_index, (episode, source, cut, num) in enumerate(turns):
        before = list(samples[source].token_ids) if source < len(samples) else []
        prompt = [*before[: max(len(before) - cut + 2, 0)], 1]
        samples.append(sample(f"e{episode}", turn_index, prompt, [1 + turn_index % 2] * num))
    chains = chains_of(samples)
    assert sorted(i for chain in chains for i in chain) == list(range(len(samples)))
    for chain in chains:
        assert len({samples[i].episode_id for i in chain}) == 1
        for earlier, later in pairwise(chain):
            assert samples[earlier].turn_index < samples[later].turn_index
            assert list(samples[later].token_ids)[: len(samples[earlier].token_ids)] == samples[earlier].token_ids
            assert samples[later].prompt_length >= len(samples[earlier].token_ids)


def test_savings_count_a_shared_beginning_once_for_the_turn_that_came_first() -> None:
    samples = [
        sample("e", 0, [1, 2], [3], agent="a"),
        sample("e", 1, [1, 2, 3, 4], [5, 6], agent="b"),
        sample("e", 2, [1, 2, 3, 4, 5, 6], [7], agent="a"),
        sample("f", 0, [8], [9], agent="a"),
    ]
    assert unique_shares(samples, chains_of(samples)) == (0.5, {"a": 6 / 12, "b": 3 / 6})
    assert unique_shares([], []) == (0.0, {})


def test_a_merged_row_holds_the_completions_of_all_its_turns() -> None:
    samples = chained_samples()
    batch = collate(samples, [(0, 1, 2), (10,)])
    assert batch.token_ids.shape == (2, max(len(samples[i].token_ids) for i in (2, 10)))
    assert batch.rows == (0, 1, 2, 10)
    assert batch.completion_lengths == (3, 6, 4, 1)
    assert batch.num_tokens == len(samples[2].token_ids) + len(samples[10].token_ids)
    completions = [token for i in batch.rows for token in samples[i].token_ids[samples[i].prompt_length :]]
    assert batch.targets.tolist() == completions
    assert batch.token_ids.flatten()[batch.predictors + 1].tolist() == completions
    torch.testing.assert_close(batch.temperature, torch.tensor([1.0] * 3 + [0.7] * 6 + [1.0] * 5))


def policy_loss(scorer: PolicyScorer, samples: Sequence[Sample], batch: Batch) -> torch.Tensor:
    """Clipped surrogate and entropy, [N]; old logprobs lie around the current ones."""
    logprobs, entropy, _ = scorer(batch, with_entropy=True)
    ratio = (logprobs - logprobs.detach() + 0.3 * torch.sin(batch.targets.to(logprobs.dtype))).exp()
    advantages = lay([s.reward for s in samples], batch)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) - 0.01 * entropy


def learned(
    model: nn.Module,
    samples: list[Sample],
    loss_of: Callable[[Any, Sequence[Sample], Batch], torch.Tensor],
    *,
    mode: Aggregation,
    rows: RowsConfig,
    budget: int = 48,
    num_workers: int = 1,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one minibatch, over the microbatches of all workers, an empty one among them."""
    denominators = Denominators.of([s.completion_length for s in samples], norm_tokens=8)
    model.zero_grad()
    total = 0.0
    for rank in range(num_workers):
        [cuts] = plan(
            chains_of(samples),
            [len(s.token_ids) for s in samples],
            num_minibatches=1,
            microbatch_tokens=budget,
            merge=rows.merge,
            pack=rows.pack,
            order=neighbours([s.token_ids for s in samples]) if rows.share else None,
            num_workers=num_workers,
            rank=rank,
            seed=0,
        )
        for chains in [*cuts, []]:
            batch = collate(samples, chains, pack=rows.pack, share=rows.share, pad_id=5)
            loss = aggregate(loss_of(model, samples, batch), batch.row_of_token, mode=mode, denominators=denominators)
            loss.backward()
            total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


F32, F64 = (torch.float32, 1e-5), (torch.float64, 1e-9)


@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance", "mode"),
    [
        *(pytest.param("qwen3", *F64, mode, marks=pytest.mark.nightly) for mode in MODES),
        ("qwen3", *F32, "token_mean"),
        pytest.param("llama", *F32, "token_mean", marks=pytest.mark.nightly),
        ("llama", *F64, "seq_mean_token_mean"),
    ],
)
def test_merging_and_packing_change_neither_loss_nor_gradient(
    architecture: str, dtype: torch.dtype, tolerance: float, mode: Aggregation
) -> None:
    samples, scorer = chained_samples(), policy(architecture, dtype)
    assert sum(map(len, CHAINS)) > len(CHAINS)
    plain_loss, plain = learned(scorer, samples, policy_loss, mode=mode, rows=PLAIN, budget=10**6)
    assert plain.abs().max() > 1e-3
    for rows in WAYS:
        for cuts in ({"budget": 10**6}, {"budget": 48}, {"budget": 1}, {"budget": 48, "num_workers": 2}):
            loss, gradient = learned(scorer, samples, policy_loss, mode=mode, rows=rows, **cuts)
            what = f"{rows}, {cuts}"
            assert abs(loss - plain_loss) < tolerance, what
            error = float((gradient - plain).abs().max() / plain.abs().max())
            assert error < tolerance, f"{what}: gradient differs by {error:.1e} of the largest"


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_merging_and_packing_change_no_gradient_under_gradient_checkpointing(architecture: str) -> None:
    samples, scorer = chained_samples(), policy(architecture, torch.float32)
    _, plain = learned(scorer, samples, policy_loss, mode="token_mean", rows=PLAIN)
    scorer = policy(architecture, torch.float32, gradient_checkpointing=True)
    for rows in WAYS:
        _, gradient = learned(scorer, samples, policy_loss, mode="token_mean", rows=rows)
        assert (gradient - plain).abs().max() < 1e-5 * plain.abs().max()


def test_merging_and_packing_change_no_gradient_of_a_critic() -> None:
    samples = chained_samples()
    critic = ValueModel(policy("qwen3", torch.float32).model.get_decoder())
    torch.manual_seed(0)
    nn.init.normal_(critic.head.weight)

    def critic_loss(model: nn.Module, samples: Sequence[Sample], batch: Batch) -> torch.Tensor:
        return (model(batch) - lay([s.reward for s in samples], batch)).square()

    _, plain = learned(critic, samples, critic_loss, mode="token_mean", rows=PLAIN)
    for rows in WAYS:
        _, gradient = learned(critic, samples, critic_loss, mode="token_mean", rows=rows)
        assert (gradient - plain).abs().max() < 1e-5 * plain.abs().max()


def test_a_chain_that_lacks_a_turn_is_still_one_row() -> None:
    samples, scorer = chained_samples(), policy("qwen3", torch.float32)
    with torch.no_grad():
        for part in ((0, 2), (1, 2), (0, 1)):
            merged = collate(samples, [part])
            together = lift(completion_logprobs(scorer, merged), merged)
            for i in part:
                alone = collate(samples, [(i,)])
                expected = lift(completion_logprobs(scorer, alone), alone)[i]
                np.testing.assert_allclose(together[i], expected, atol=2e-6)
