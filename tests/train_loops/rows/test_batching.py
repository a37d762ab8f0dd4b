"""batching, logprobs, critic: how rows are padded, ordered, cut and dealt changes no number and no gradient."""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chained_samples import sample
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from train_loops.engine import logprobs as logprobs_module
from train_loops.engine.critic import ValueModel
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs
from train_loops.rows.batching import Batch, collate, collate_turns, deal_minibatches, lay, lift, microbatches, plan
from train_loops.rows.samples import Masks, Sample
from train_loops.rows.sharing import Chain
from train_loops.signal.losses import Denominators

pytestmark = pytest.mark.fast

SHAPES = [(5, 3), (2, 7), (11, 1), (4, 4), (9, 6), (1, 2), (6, 5)]
"""(prompt, completion) lengths."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    rows = []
    for i, (prompt, completion) in enumerate(SHAPES):
        ids = rng.integers(3, 290, prompt + completion).tolist()
        logprobs = (-rng.random(completion)).tolist()
        row = sample(f"e{i}", 0, ids[:prompt], ids[prompt:], agent="ab"[i % 2], rollout_logprobs=logprobs)
        rows.append(replace(row, reward=float(rng.normal())))
    return rows


@pytest.fixture
def scorer(tiny_model: Path) -> PolicyScorer:
    return PolicyScorer(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


@pytest.fixture
def critic(tiny_model: Path) -> ValueModel:
    model = ValueModel.from_policy(tiny_model)
    torch.manual_seed(0)
    nn.init.normal_(model.head.weight)
    return model


def alone(rows: Iterable[int]) -> list[Chain]:
    """A chain of every row."""
    return [(row,) for row in rows]


def test_a_batch_names_predictor_and_target_of_every_completion_token(samples: list[Sample]) -> None:
    batch = collate(samples, alone([0, 2]), pad_id=9)
    assert batch.token_ids.shape == (2, 12)
    assert batch.token_ids[0, 8:].tolist() == [9] * 4
    assert batch.predictors.tolist() == [4, 5, 6, 12 + 10]
    assert batch.targets.tolist() == [*samples[0].token_ids[5:], samples[2].token_ids[-1]]
    assert (batch.row_of_token.tolist(), batch.rows, batch.completion_lengths) == ([0, 0, 0, 1], (0, 2), (3, 1))
    assert batch.num_tokens == 20
    assert (batch.position_ids, batch.families) == (None, None)


def test_turns_that_are_no_samples_are_laid_out_alike(samples: list[Sample]) -> None:
    turns = [(s.token_ids[: s.prompt_length], s.token_ids[s.prompt_length :]) for s in (samples[0], samples[2])]
    batch, expected = collate_turns(turns), collate(samples, alone([0, 2]))
    for name in ("token_ids", "predictors", "targets", "row_of_token"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist()
    assert batch.temperature.tolist() == [1.0] * 4
    assert batch.rows == (0, 1)


def test_lay_and_lift_are_inverse_and_a_scalar_fills_its_row(samples: list[Sample]) -> None:
    batch = collate(samples, alone([4, 1]))
    per_row = {i: np.random.default_rng(i).random(SHAPES[i][1]).astype(np.float32) for i in (1, 4)}
    back = lift(lay(per_row, batch), batch)
    assert {i: x.tolist() for i, x in back.items()} == {i: x.tolist() for i, x in per_row.items()}
    filled = lay([0.0, 2.5, 0.0, 0.0, -1.0], batch)
    assert (filled.tolist(), filled.dtype) == ([-1.0] * 6 + [2.5] * 7, torch.float32)
    empty = collate(samples, [])
    assert (lay(per_row, empty).shape, lift(lay(per_row, empty), empty)) == ((0,), {})


def test_a_token_is_held_to_the_mask_it_was_sampled_under(samples: list[Sample]) -> None:
    table = np.arange(8, dtype=np.int32)[:, None]
    constrained = [
        replace(samples[0], masks=Masks(table=table, of_token=np.array([5, 2, 5]))),
        samples[1],
        replace(samples[2], masks=Masks(table=table, of_token=np.array([7]))),
    ]
    for pack in (False, True):
        batch = collate(constrained, [(0,), (1,), (2,)], pack=pack)
        assert batch.masks is not None and batch.mask_of_token is not None
        allowed = batch.masks[batch.mask_of_token][:, 0].tolist()
        assert allowed == [5, 2, 5, *[0] * SHAPES[1][1], 7], "row 0 of the table allows every token"


def test_what_rows_share_is_computed_once_only_where_that_is_asked_for(samples: list[Sample]) -> None:
    prompt = list(range(40))
    alike = [replace(samples[0], token_ids=[*prompt, 50 + i, 60], prompt_length=40) for i in range(3)]
    rows = [(0,), (1,), (2,)]
    assert collate(alike, rows, pack=True).num_tokens == 3 * 42
    assert collate(alike, rows, pack=True, share=True).num_tokens == 40 + 3 * 2


def test_values_are_laid_where_the_batch_is(samples: list[Sample]) -> None:
    batch = collate(samples, [(0,)])
    assert lay([1.0], batch).device.type == "cpu"
    assert lay([1.0], batch.to("meta")).device.type == "meta"


def test_a_batch_moves_as_a_whole(samples: list[Sample]) -> None:
    masks = Masks(table=np.zeros((1, 10), dtype=np.int32), of_token=np.zeros(SHAPES[0][1], dtype=np.int64))
    constrained = [replace(samples[0], masks=masks), *samples[1:]]
    for pack in (False, True):
        for some in (samples, constrained):
            batch = collate(some, alone([0, 2]), pack=pack)
            moved = batch.to("meta")
            assert (batch.families is None, batch.masks is None) == (not pack, some is samples)
            for name in (f.name for f in fields(batch)):
                before, after = getattr(batch, name), getattr(moved, name)
                if isinstance(before, torch.Tensor):
                    assert after.device.type == "meta" and after.shape == before.shape, name
                elif name != "families":
                    assert after == before, name
            if pack:
                families = [x for f in moved.families.families for x in (f.queries, f.keys)]
                assert {t.device.type for t in (moved.families.outputs, *families)} == {"meta"}


@given(
    turns=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), max_size=15),
    num_minibatches=st.integers(1, 5),
    budget=st.integers(1, 200),
    num_workers=st.integers(1, 4),
    merge=st.booleans(),
    pack=st.booleans(),
    seed=st.integers(0, 3),
)
def test_workers_see_every_row_once_and_run_the_same_number_of_microbatches(
    turns: list[list[int]],
    num_minibatches: int,
    budget: int,
    num_workers: int,
    merge: bool,
    pack: bool,
    seed: int,
) -> None:
    # A chain's turns grow: the lengths of every chain are running sums.
    lengths = [int(length) for added in turns for length in np.cumsum(added)]
    begins = np.cumsum([0, *map(len, turns)]).tolist()
    chains = [tuple(range(start, start + len(added))) for start, added in zip(begins, turns, strict=False)]
    settings = {"num_minibatches": num_minibatches, "microbatch_tokens": budget, "merge": merge, "pack": pack}
    plans = [
        plan(chains, lengths, **settings, num_workers=num_workers, rank=rank, seed=seed) for rank in range(num_workers)
    ]
    rows = [row for p in plans for minibatch in p for micro in minibatch for row in micro]
    assert sorted(rows) == (sorted(chains) if merge else alone(range(len(lengths))))
    dealt = deal_minibatches(chains, num_minibatches, seed=seed)
    assert len(dealt) == min(num_minibatches, len(chains))
    for k, minibatch in enumerate(zip(*plans, strict=True)):
        micros = [micro for of_worker in minibatch for micro in of_worker]
        assert len({len(of_worker) for of_worker in minibatch}) == 1
        # Merging changes no minibatch.
        assert sorted(i for micro in micros for row in micro for i in row) == sorted(i for c in dealt[k] for i in c)
        for micro in (micro for micro in micros if len(micro) > 1):
            sizes = [lengths[row[-1]] for row in micro]
            assert (sum(sizes) if pack else len(sizes) * max(sizes)) <= budget
        counts = [len(micro) for micro in micros]
        assert counts.count(0) < num_workers
        assert 0 not in counts or max(counts) == 1, "empty ones only where nothing is left to split"


def test_minibatches_are_dealt_at_random_and_differ_by_at_most_one_chain() -> None:
    rows = alone(range(100))
    one, other = deal_minibatches(rows, 3, seed=0), deal_minibatches(rows, 3, seed=1)
    assert [len(m) for m in one] == [34, 33, 33]
    assert one != other
    assert one == deal_minibatches(rows, 3, seed=0)
    # Not sorted by length or by place: rows of the first half are in every minibatch.
    assert all(10 < sum(row < 50 for (row,) in m) < 25 for m in one)
    assert deal_minibatches([], 3, seed=0) == []


def test_a_row_longer_than_the_budget_is_a_microbatch_of_its_own() -> None:
    for pack in (False, True):
        assert microbatches(alone([0, 1, 2]), [4, 100, 4], max_tokens=8, pack=pack) == [alone([1]), alone([0, 2])]


def test_a_packed_microbatch_is_cut_by_the_sum_of_its_rows() -> None:
    lengths = [10, 3, 4, 2, 9]
    assert microbatches(alone(range(5)), lengths, max_tokens=20) == [alone([0, 4]), alone([2, 1, 3])]
    assert microbatches(alone(range(5)), lengths, max_tokens=26, pack=True) == [alone([0, 4, 2, 1]), alone([3])]
    assert microbatches([(3, 0), (1, 2)], lengths, max_tokens=14, pack=True) == [[(3, 0), (1, 2)]]
    order = [4, 0, 1, 2, 3]
    cut = microbatches(alone(range(5)), lengths, max_tokens=18, pack=True, order=order)
    assert cut == [alone([1, 2, 3, 4]), alone([0])]
    assert microbatches(alone(range(5)), lengths, max_tokens=20, order=order) == [alone([0, 4]), alone([2, 1, 3])]


def test_a_plan_merges_and_packs_for_one_worker_unless_told_otherwise() -> None:
    chains, lengths = [(0, 1), (2,), (3,)], [2, 6, 5, 1]
    settings = {"num_minibatches": 1, "microbatch_tokens": 7, "seed": 0}
    assert plan(chains, lengths, **settings) == [[[(0, 1)], [(2,), (3,)]]]
    assert plan(chains, lengths, **settings, merge=False) == [[[(1,)], [(2,), (0,)], [(3,)]]]
    assert plan(chains, lengths, **settings, order=[0, 2, 1, 0]) == [[[(3,), (2,)], [(0, 1)]]]
    assert plan(chains, [2, 6, 3, 1], **settings, pack=False) == [[[(0, 1)], [(2,), (3,)]]]
    assert plan(chains, [2, 6, 4, 1], **settings, pack=False) == [[[(0, 1)], [(2,)], [(3,)]]]
    assert plan(chains, [2, 6, 4, 1], **settings, pack=True) == [[[(0, 1)], [(2,), (3,)]]]


def test_microbatches_are_halved_only_where_workers_would_wait() -> None:
    rows, settings = alone(range(4)), {"num_minibatches": 1, "seed": 0}
    for num_workers, budget, sizes in ((2, 2, [2, 2]), (2, 4, [2, 2]), (4, 4, [1, 1, 1, 1]), (1, 4, [4])):
        plans = [
            plan(rows, [1] * 4, **settings, microbatch_tokens=budget, num_workers=num_workers, rank=rank)
            for rank in range(num_workers)
        ]
        assert [len(micro) for ((*micros,),) in plans for micro in micros] == sizes


def test_completion_logprobs_equal_those_of_the_whole_logits(scorer: PolicyScorer, samples: list[Sample]) -> None:
    batch = collate(samples, alone(range(len(samples))))
    got, entropy, _ = scorer(batch, with_entropy=True)
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    is_real = torch.arange(batch.token_ids.shape[1]) < lengths[:, None]
    logits = scorer.model(input_ids=batch.token_ids, attention_mask=is_real.long()).logits
    temperature = torch.tensor([s.temperature for s in samples])
    scaled = torch.log_softmax(logits[:, :-1] / temperature[:, None, None], dim=-1)
    places = [(i, t) for i, s in enumerate(samples) for t in range(s.prompt_length - 1, len(s.token_ids) - 1)]
    want = torch.stack([scaled[i, t, samples[i].token_ids[t + 1]] for i, t in places])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    spread = torch.stack([-(scaled[i, t].exp() * scaled[i, t]).sum() for i, t in places])
    torch.testing.assert_close(entropy, spread, atol=2e-5, rtol=0)
    assert (entropy > 1).all()


@pytest.mark.parametrize("pack", [False, True])
def test_a_rows_logprobs_depend_neither_on_padding_nor_on_its_neighbours(
    scorer: PolicyScorer, samples: list[Sample], pack: bool
) -> None:
    with torch.no_grad():
        batch = collate(samples, alone([3, 2, 0, 6]), pad_id=17, pack=pack)
        together = lift(completion_logprobs(scorer, batch), batch)
        for row in (3, 2, 0, 6):
            by_itself = collate(samples, [(row,)])
            expected = lift(completion_logprobs(scorer, by_itself), by_itself)[row]
            np.testing.assert_allclose(expected, together[row], atol=2e-6)


def gradient(
    model: nn.Module, loss_of: Callable[[Batch, Denominators], torch.Tensor], samples: list, cuts: list
) -> dict:
    denominators = Denominators.of([samples[row].completion_length for rows in cuts for row in rows])
    model.zero_grad()
    for rows in cuts:
        loss_of(collate(samples, alone(rows)), denominators).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


CUTS = {
    "another order": [[6, 2, 4, 0, 1, 5, 3]],
    "one row each": [[i] for i in range(7)],
    "by length, with empty ones": [[2, 4], [6, 0, 1], [3], [5], [], []],
}


def test_cuts_padding_and_order_of_rows_change_no_gradient(
    scorer: PolicyScorer, critic: ValueModel, samples: list[Sample]
) -> None:
    rewards = [s.reward for s in samples]

    def policy_loss(batch: Batch, denominators: Denominators) -> torch.Tensor:
        logprobs, entropy, _ = scorer(batch, with_entropy=True)
        return (logprobs.exp() * lay(rewards, batch) - 0.01 * entropy).sum() / denominators.num_tokens

    def critic_loss(batch: Batch, denominators: Denominators) -> torch.Tensor:
        return (critic(batch) - lay(rewards, batch)).square().sum() / denominators.num_tokens

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
        logprobs, entropy, _ = scorer(batch, with_entropy=True)
        return (logprobs + entropy).sum() / denominators.num_tokens

    want = gradient(scorer, loss_of, samples, [list(range(7))])
    with torch.no_grad():
        whole = scorer(collate(samples, alone(range(7))), with_entropy=True)[:2]
    monkeypatch.setattr(logprobs_module, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(logprobs_module, "SCORING_CHUNK_TOKENS", 3)
    got = gradient(scorer, loss_of, samples, [list(range(7))])
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(scorer(collate(samples, alone(range(7))), with_entropy=True)[:2], whole)


def test_an_empty_microbatch_gives_every_parameter_a_gradient_of_zero(
    scorer: PolicyScorer, critic: ValueModel, samples: list[Sample]
) -> None:
    empty = collate(samples, [], pad_id=5)  # 0 is the pad token, whose embedding is zero: it would hide a gradient
    assert (empty.token_ids.tolist(), empty.num_tokens, empty.rows) == ([[5, 5]], 0, ())
    for values in (completion_logprobs(scorer, empty), critic(empty)):
        assert values.shape == (0,)
        values.sum().backward()
    for name, p in [*scorer.named_parameters(), *critic.named_parameters()]:
        assert p.grad is not None, name
        assert p.grad.abs().max() == 0, name


def test_a_fresh_critic_values_everything_at_zero(tiny_model: Path, critic: ValueModel, samples: list[Sample]) -> None:
    batch = collate(samples, alone(range(7)))
    assert ValueModel.from_policy(tiny_model)(batch).abs().max() == 0
    assert critic(batch).std() > 0.1


def test_a_value_is_known_before_its_token_is_sampled(critic: ValueModel, samples: list[Sample]) -> None:
    batch = collate(samples, [(1,)])  # two tokens of prompt, seven of completion
    values = critic(batch)
    changed = batch.token_ids.clone()
    changed[0, 5:] = 3  # the outcomes of the fourth completion token and later
    after = critic(replace(batch, token_ids=changed))
    torch.testing.assert_close(after[:4], values[:4])
    assert (after[4:] != values[4:]).any()


def test_a_value_head_on_the_policys_trunk_gives_values_in_the_same_pass(
    scorer: PolicyScorer, critic: ValueModel, samples: list[Sample]
) -> None:
    batch, empty = collate(samples, alone(range(7)), pack=True), collate(samples, [])
    with pytest.raises(ValueError, match=r"no value head.*train\.critic\.kind: shared"):
        scorer(batch, with_values=True)
    scorer.value_head = critic.head
    logprobs, _, values = scorer(batch, with_values=True)
    torch.testing.assert_close(logprobs, completion_logprobs(scorer, batch))
    torch.testing.assert_close(values, critic(batch))  # started from the same trunk
    scorer(empty, with_values=True)[2].sum().backward()
    assert critic.head.weight.grad is not None
    assert critic.head.weight.grad.abs().max() == 0
