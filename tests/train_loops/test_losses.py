"""losses and kl: literal numbers of seed-systems 2.1 and 2.10, and what the clips do to gradients."""

import numpy as np
import pytest
import torch

from train_loops.kl import kl_estimate, token_rewards
from train_loops.losses import Denominators, aggregate, ppo_clip, value_loss

ONE = torch.ones(1, 1, dtype=torch.bool)


def clip_loss(ratio: float, advantage: float, **settings: float | None) -> float:
    logprobs, old = torch.tensor([[ratio]]).log(), torch.zeros(1, 1)
    return ppo_clip(logprobs, old, torch.tensor([[advantage]]), ONE, **settings)[0].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss"),
    [
        (1.5, 1.0, {}, -1.2),
        (1.5, 1.0, {"clip_high": 0.28}, -1.28),
        (1.25, 1.0, {"clip_high": 0.28}, -1.25),
        (0.5, 1.0, {}, -0.5),
        (0.5, -1.0, {}, 0.8),
        (0.5, -1.0, {"clip_low": 0.3}, 0.7),
        (1.5, -1.0, {}, 1.5),
        (5.0, -1.0, {}, 3.0),
        (5.0, -1.0, {"dual_clip": None}, 5.0),
        (5.0, 1.0, {}, -1.2),
    ],
)
def test_the_clipped_loss_has_its_literal_values(ratio: float, advantage: float, settings: dict, loss: float) -> None:
    assert clip_loss(ratio, advantage, **settings) == pytest.approx(loss, abs=1e-6)


def test_a_log_ratio_beyond_20_is_clamped() -> None:
    loss, metrics = ppo_clip(torch.zeros(1, 1), torch.full((1, 1), -90.0), -torch.ones(1, 1), ONE, dual_clip=None)
    assert loss.item() == pytest.approx(float(np.exp(20)), rel=1e-6)
    assert metrics["approx_kl"].item() == -20


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_advantage_times_ratio() -> None:
    logprobs = torch.tensor([[1.5, 1.1, 5.0]]).log().requires_grad_()
    loss, metrics = ppo_clip(logprobs, torch.zeros(1, 3), torch.tensor([[2.0, 2.0, -2.0]]), torch.ones(1, 3).bool())
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, torch.tensor([[0.0, -2.2, 0.0]]))
    assert (metrics["clip_share"].item(), metrics["dual_clip_share"].item()) == (1, 1)
    assert metrics["ratio"].item() == pytest.approx(7.6)


def test_importance_weights_multiply_the_loss_and_metrics_ignore_masked_tokens() -> None:
    logprobs = torch.tensor([[1.1, 9.0]]).log()
    mask = torch.tensor([[True, False]])
    loss, metrics = ppo_clip(
        logprobs, torch.zeros(1, 2), torch.ones(1, 2), mask, importance_weights=torch.tensor([[0.5, 2.0]])
    )
    assert loss[0, 0].item() == pytest.approx(-0.55)
    assert metrics["ratio"].item() == pytest.approx(1.1)
    assert metrics["clip_share"].item() == 0


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token_mean", 2.5),
        ("seq_mean_token_sum", 5.0),
        ("seq_mean_token_mean", 3.0),
        ("seq_mean_token_sum_norm", 10 / 3),
    ],
)
def test_aggregation_modes_have_their_literal_values_however_the_rows_are_cut(mode: str, value: float) -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, float("inf")]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    denominators = Denominators.of([3, 1])
    whole = aggregate(loss, mask, mode=mode, denominators=denominators)
    cut = sum(
        aggregate(loss[i : i + 1, :n], mask[i : i + 1, :n], mode=mode, denominators=denominators)
        for i, n in ((0, 3), (1, 2))
    )
    empty = aggregate(loss[:1], torch.zeros_like(mask[:1]), mode=mode, denominators=denominators)
    assert whole.item() == pytest.approx(value)
    assert cut.item() == pytest.approx(value)
    assert empty.item() == 0


def test_an_unknown_aggregation_or_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*token_mean"):
        aggregate(torch.ones(1, 1), ONE, mode="mean", denominators=Denominators.of([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "old", "returns", "loss"),
    [
        (1.0, 1.0, 0.0, 0.5),
        (2.0, 0.0, 0.0, 2.0),  # clipped to 0.5 it would look better: the worse of the two counts
        (2.0, 0.0, 2.0, 0.5 * 1.5**2),  # right, but too far from the old value
        (-2.0, 0.0, 1.0, 0.5 * 9.0),
    ],
)
def test_the_value_loss_is_half_the_worse_of_plain_and_clipped(
    values: float, old: float, returns: float, loss: float
) -> None:
    got, _ = value_loss(torch.tensor([[values]]), torch.tensor([[old]]), torch.tensor([[returns]]), ONE, value_clip=0.5)
    assert got.item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("estimator", "logprob", "ref", "value"),
    [
        ("k1", -1.0, -1.5, 0.5),
        ("k1", -1.5, -1.0, -0.5),
        ("abs", -1.5, -1.0, 0.5),
        ("k2", -1.0, -1.5, 0.125),
        ("k3", -1.0, -1.5, 0.106531),
        ("k3", -90.0, -1.0, 10.0),
        ("k3", -1.0, -90.0, 10.0),
    ],
)
def test_kl_estimators_have_their_literal_values(estimator: str, logprob: float, ref: float, value: float) -> None:
    got = kl_estimate(torch.tensor([logprob]), torch.tensor([ref]), estimator)  # type: ignore[arg-type]
    assert got.item() == pytest.approx(value, abs=1e-6)


def test_k1_and_k3_average_to_the_kl_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = (p * (p / q).log()).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(exact, abs=1e-6)


def test_kl_in_reward_lowers_every_token_and_the_score_stands_on_the_last() -> None:
    plain = token_rewards([1.0, -2.0], [3, 1])
    assert [r.tolist() for r in plain] == [[0, 0, 1], [-2]]
    with_kl = token_rewards([1.0, -2.0], [3, 1], kl=[np.array([0.1, 0.2, 0.3]), np.array([0.5])], beta=0.1)
    np.testing.assert_allclose(with_kl[0], [-0.01, -0.02, 0.97])
    np.testing.assert_allclose(with_kl[1], [-2.05])
