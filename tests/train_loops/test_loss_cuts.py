"""losses: how rows are cut into microbatches, ordered, masked or weighed changes neither the loss nor its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_loops.config import LossConfig
from train_loops.signal.losses import Aggregation, Denominators, aggregate, policy_loss, value_loss

pytestmark = pytest.mark.fast

POLICIES = ("ppo_clip", "gspo", "cispo", "reinforce")
MODES = get_args(Aggregation)
lengths_of_rows = st.lists(st.integers(1, 5), min_size=1, max_size=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Per row one tensor over its tokens, float64."""

    logprobs: list[torch.Tensor]
    old: list[torch.Tensor]
    advantages: list[torch.Tensor]
    weights: list[torch.Tensor]
    kept: list[torch.Tensor]


def drawn_rows(lengths: list[int], *, seed: int) -> Rows:
    random = torch.Generator().manual_seed(seed)

    def normal() -> list[torch.Tensor]:
        return [torch.randn(n, generator=random, dtype=torch.float64) for n in lengths]

    old = [x - 2 for x in normal()]
    return Rows(
        logprobs=[(x + 0.3 * d).requires_grad_() for x, d in zip(old, normal(), strict=True)],
        old=old,
        advantages=normal(),
        weights=[x.abs() for x in normal()],
        kept=[x > -0.5 for x in normal()],
    )


def share_of(rows: Rows, part: list[int], *, policy: str, mode: Any, denominators: Denominators) -> torch.Tensor:
    """The loss share of one microbatch, whose rows lie in the order of `part`."""
    row_of_token = torch.cat([torch.full((len(rows.old[i]),), at) for at, i in enumerate(part)])
    flat = {name: torch.cat([getattr(rows, name)[i] for i in part]) for name in Rows.__dataclass_fields__}
    per_token, _ = policy_loss(
        flat["logprobs"],
        flat["old"],
        flat["advantages"],
        row_of_token,
        loss=LossConfig(policy=policy),  # type: ignore[arg-type]
        importance_weights=flat["weights"],
        keep_mask=flat["kept"],
    )
    return aggregate(per_token, row_of_token, mode=mode, denominators=denominators)


def loss_and_gradient(rows: Rows, parts: list[list[int]], **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all microbatches, each with a backward pass of its own; the gradient in the order of the rows."""
    for x in rows.logprobs:
        x.grad = None
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        share = share_of(rows, part, **how)
        share.backward()
        total += share.detach()
    return total, torch.cat([x.grad for x in rows.logprobs])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@given(lengths=lengths_of_rows, seed=st.integers(0, 99), random=st.randoms(use_true_random=False))
def test_any_cut_in_any_order_gives_the_loss_and_the_gradient_of_the_whole(
    policy: str, mode: str, lengths: list[int], seed: int, random: Any
) -> None:
    rows = drawn_rows(lengths, seed=seed)
    how = {"policy": policy, "mode": mode, "denominators": Denominators.of(lengths, norm_tokens=5)}
    order = list(range(len(lengths)))
    whole = loss_and_gradient(rows, [order], **how)
    shuffled = random.sample(order, len(order))
    cuts = sorted(random.sample(range(1, len(order)), random.randint(0, len(order) - 1)))
    parts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    for got, want in zip(loss_and_gradient(rows, parts, **how), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_rows_gradient_does_not_depend_on_the_rows_beside_it(policy: str, mode: str) -> None:
    lengths = [3, 1, 4]
    rows = drawn_rows(lengths, seed=3)
    how = {"policy": policy, "mode": mode, "denominators": Denominators.of(lengths, norm_tokens=5)}
    _, together = loss_and_gradient(rows, [[0, 1, 2]], **how)
    share_of(alone := drawn_rows(lengths, seed=3), [2], **how).backward()
    torch.testing.assert_close(alone.logprobs[2].grad, together[4:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_twice_the_advantages_are_twice_the_loss_and_the_gradient(policy: str, mode: str) -> None:
    lengths = [2, 5]
    how = {"policy": policy, "mode": mode, "denominators": Denominators.of(lengths, norm_tokens=5)}
    rows = drawn_rows(lengths, seed=1)
    plain = loss_and_gradient(rows, [[0, 1]], **how)
    for x in rows.advantages:
        x *= 2
    for got, want in zip(loss_and_gradient(rows, [[0, 1]], **how), plain, strict=True):
        torch.testing.assert_close(got, 2 * want)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_masked_token_weighs_nothing_and_the_others_what_they_weighed(policy: str) -> None:
    rows = drawn_rows([3, 2], seed=5)
    how: dict[str, Any] = {"policy": policy, "mode": "seq_mean_token_mean", "denominators": Denominators.of([3, 2])}
    for x in rows.kept:
        x.fill_(True)
    _, plain = loss_and_gradient(rows, [[0, 1]], **how)
    rows.kept[0][1] = False
    _, masked = loss_and_gradient(rows, [[0, 1]], **how)
    assert masked[1] == 0
    torch.testing.assert_close(masked[[0, 2, 3, 4]], plain[[0, 2, 3, 4]], rtol=0, atol=0)


def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce() -> None:
    rows = drawn_rows([3, 2], seed=7)
    for x, old in zip(rows.logprobs, rows.old, strict=True):
        x.data.copy_(old)
    how: dict[str, Any] = {"mode": "token_mean", "denominators": Denominators.of([3, 2])}
    _, want = loss_and_gradient(rows, [[0, 1]], policy="reinforce", **how)
    for policy in ("ppo_clip", "gspo", "cispo"):
        _, got = loss_and_gradient(rows, [[0, 1]], policy=policy, **how)
        torch.testing.assert_close(got, want)


def test_gspos_ratio_is_the_rows_beside_an_unlikely_token_too() -> None:
    """Its clips are at 3e-4: the 4e-6 that float32 rounds off beside a logprob of -80 must not enter."""
    logprobs, old = torch.tensor([-80.0, -1.0]), torch.tensor([-80.0, -1.0001])
    _, about = policy_loss(
        logprobs, old, torch.ones(2), torch.zeros(2, dtype=torch.long), loss=LossConfig(policy="gspo")
    )
    torch.testing.assert_close(about["ratio"], torch.full((2,), 1.00005), rtol=0, atol=3e-7)


@pytest.mark.parametrize("huber_delta", [None, 0.5])
def test_the_value_loss_has_the_gradient_of_the_part_that_decides(huber_delta: float | None) -> None:
    values = torch.tensor([0.1, 2.0, -2.0], requires_grad=True)
    loss, about = value_loss(
        values, torch.zeros(3), torch.tensor([1.0, 2.0, 1.0]), value_clip=0.5, huber_delta=huber_delta
    )
    loss.sum().backward()
    # Near the old value: v - G. Right but clipped: no gradient. Far and wrong: the plain error. Huber cuts them at delta.
    want = [-0.9, 0.0, -3.0] if huber_delta is None else [-0.5, 0.0, -0.5]
    torch.testing.assert_close(values.grad, torch.tensor(want))
    assert about["value_clip_share"].tolist() == [0, 1, 0]
