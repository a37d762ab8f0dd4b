"""losses and kl give literal numbers worked out by hand, and the clips act on the gradients as the papers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train_loops.config import LossConfig
from train_loops.signal.kl import adapted_coef, kl_estimate, token_rewards
from train_loops.signal.learning_signal import overlong_penalty
from train_loops.signal.losses import Denominators, aggregate, cispo, gspo, policy_loss, ppo_clip, reinforce, value_loss

pytestmark = pytest.mark.fast

ONE_ROW = torch.zeros(1, dtype=torch.long)


def clip_loss(ratio: float, advantage: float, **settings: float | None) -> float:
    return ppo_clip(torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([advantage]), **settings)[0].item()


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


@pytest.mark.parametrize(("advantage", "loss"), [(2.0, -2.64), (-2.0, 2.86)])
def test_an_advantage_weighed_by_happos_factor_has_its_literal_loss(advantage: float, loss: float) -> None:
    assert clip_loss(1.3, 1.1 * advantage) == pytest.approx(loss, abs=1e-5)


def test_a_log_ratio_beyond_20_is_clamped() -> None:
    loss, about = ppo_clip(torch.zeros(1), torch.full((1,), -90.0), -torch.ones(1), dual_clip=None)
    assert loss.item() == pytest.approx(float(np.exp(20)), rel=1e-6)
    assert about["approx_kl"].item() == -20


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_advantage_times_ratio() -> None:
    logprobs = torch.tensor([1.5, 1.1, 5.0]).log().requires_grad_()
    loss, about = ppo_clip(logprobs, torch.zeros(3), torch.tensor([2.0, 2.0, -2.0]))
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, torch.tensor([0.0, -2.2, 0.0]))
    assert (about["clip_share"].tolist(), about["dual_clip_share"].tolist()) == ([1, 0, 0], [0, 0, 1])
    torch.testing.assert_close(about["ratio"], torch.tensor([1.5, 1.1, 5.0]))


def test_gspo_gives_every_token_of_a_row_the_rows_ratio_and_its_gradient() -> None:
    logprobs = torch.tensor([0.1, 0.3, 0.5], requires_grad=True)
    row_of_token = torch.tensor([0, 0, 1])
    loss, about = gspo(logprobs, torch.zeros(3), torch.ones(3), row_of_token, clip_low=0.9, clip_high=0.9)
    torch.testing.assert_close(about["ratio"], torch.tensor([1.221403, 1.221403, 1.648721]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.221403, -1.221403, -1.648721]))
    clipped, about = gspo(logprobs, torch.zeros(3), torch.ones(3), row_of_token, clip_low=3e-4, clip_high=4e-4)
    torch.testing.assert_close(clipped, torch.full((3,), -1.0004))
    assert about["clip_share"].tolist() == [1, 1, 1]


def test_gspos_log_ratio_is_clamped_at_10() -> None:
    loss, _ = gspo(torch.zeros(1), torch.full((1,), -15.0), -torch.ones(1), ONE_ROW, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(float(np.exp(10)), rel=1e-6)


def test_gspos_ratio_is_that_of_the_whole_sequence_however_far_one_token_is() -> None:
    logprobs, old = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-41.0, -1.0, -1.0, -1.0])
    old[1:] += torch.tensor([12.0, 14.0, 13.0])  # d is 40, -12, -14, -13: their mean is 0.25
    loss, about = gspo(logprobs, old, -torch.ones(4), torch.zeros(4, dtype=torch.long), clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(about["ratio"], torch.full((4,), float(np.exp(0.25))))
    torch.testing.assert_close(loss, torch.full((4,), float(np.exp(0.25))))
    assert about["approx_kl"].tolist() == [-40, 12, 14, 13]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logprobs = torch.tensor([3.0, 1.1]).log().requires_grad_()
    loss, about = cispo(logprobs, torch.zeros(2), torch.tensor([2.0, 2.0]), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss.detach(), torch.tensor([-2.56 * np.log(3.0), -2.2 * np.log(1.1)]).float())
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.56, -2.2]))
    assert about["clip_share"].tolist() == [1, 0]


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss, _ = reinforce(logprobs, torch.tensor([-0.5, -1.0]), torch.tensor([2.0, -1.0]))
    assert loss.tolist() == [1.0, -2.0]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_importance_weights_multiply_every_loss_and_masked_tokens_have_none(policy: str) -> None:
    logprobs, old = torch.tensor([-1.0, -0.9, -1.1], requires_grad=True), torch.full((3,), -1.0)
    given = (logprobs, old, torch.ones(3), torch.tensor([0, 0, 1]))
    plain, _ = policy_loss(*given, loss=LossConfig(policy=policy))
    weights, kept = torch.tensor([0.5, 2.0, 2.0]), torch.tensor([True, True, False])
    weighed, _ = policy_loss(*given, loss=LossConfig(policy=policy), importance_weights=weights, keep_mask=kept)
    torch.testing.assert_close(weighed, plain * torch.tensor([0.5, 2.0, 0.0]))
    weighed.sum().backward()
    assert logprobs.grad[2] == 0


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token_mean", 2.5),
        ("seq_mean_token_sum", 5.0),
        ("seq_mean_token_mean", 3.0),
        ("seq_mean_token_sum_norm", 5 / 3),
    ],
)
def test_aggregation_modes_have_their_literal_values_however_the_rows_are_cut(mode: str, value: float) -> None:
    loss, row_of_token = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1])
    denominators = Denominators.of([3, 1], norm_tokens=3)
    whole = aggregate(loss, row_of_token, mode=mode, denominators=denominators)
    first = aggregate(loss[:3], row_of_token[:3], mode=mode, denominators=denominators)
    second = aggregate(loss[3:], row_of_token[3:] - 1, mode=mode, denominators=denominators)
    empty = aggregate(loss[:0], row_of_token[:0], mode=mode, denominators=denominators)
    assert whole.item() == pytest.approx(value)
    assert first.item() + second.item() == pytest.approx(value)
    assert empty.item() == 0


def test_the_norm_of_dr_grpo_is_a_mean_over_rows_by_a_constant_whatever_their_lengths() -> None:
    """Twice as many rows of the same kind change nothing, and a longer row beside a row changes nothing of its weight."""
    lengths = [3, 1]
    for rows in (lengths, lengths * 2):
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        denominators = Denominators.of(rows, norm_tokens=100)
        share = aggregate(
            torch.ones(sum(rows)), row_of_token, mode="seq_mean_token_sum_norm", denominators=denominators
        )
        assert share.item() == pytest.approx((3 + 1) / 2 / 100)
    first_row = torch.tensor([1.0, 1.0])
    weights = [
        aggregate(
            first_row,
            torch.zeros(2, dtype=torch.long),
            mode="seq_mean_token_sum_norm",
            denominators=Denominators.of([2, other], norm_tokens=100),
        ).item()
        for other in (1, 90)
    ]
    assert weights == pytest.approx([0.01, 0.01])


def test_the_norm_of_dr_grpo_needs_its_constant() -> None:
    with pytest.raises(
        ValueError, match=r"train\.loss\.norm_tokens is null: give the largest max_tokens of the agents"
    ):
        aggregate(torch.ones(1), ONE_ROW, mode="seq_mean_token_sum_norm", denominators=Denominators.of([1]))


def test_an_unknown_aggregation_or_estimator_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*token_mean"):
        aggregate(torch.ones(1), ONE_ROW, mode="mean", denominators=Denominators.of([1]))  # type: ignore[arg-type]
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
    got, _ = value_loss(torch.tensor([values]), torch.tensor([old]), torch.tensor([returns]), value_clip=0.5)
    assert got.item() == pytest.approx(loss)


def test_hubers_value_loss_grows_linearly_beyond_delta() -> None:
    given = (torch.tensor([1.0, 13.0]), torch.tensor([1.0, 13.0]), torch.zeros(2))
    got, _ = value_loss(*given, value_clip=0.2, huber_delta=10.0)
    assert got.tolist() == [0.5, 10 * (13 - 5)]


@pytest.mark.parametrize(("length", "penalty"), [(70, 0.0), (80, 0.0), (90, -0.5), (100, -1.0)])
def test_the_overlong_penalty_has_its_literal_values(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer_tokens=20, penalty=1.0) == pytest.approx(penalty)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (5, -0.5), (10, -1.0)])
def test_where_the_limit_is_below_the_buffer_an_empty_completion_costs_nothing(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=10, buffer_tokens=20, penalty=1.0) == pytest.approx(penalty)


def test_the_adaptive_kl_coefficient_follows_its_target_by_a_fifth_at_most() -> None:
    settings = {"num_episodes": 1000, "target": 0.1, "horizon": 10_000}
    assert adapted_coef(0.5, kl=0.11, **settings) == pytest.approx(0.5 * 1.01)
    assert adapted_coef(0.5, kl=9.0, **settings) == pytest.approx(0.5 * 1.02)
    assert adapted_coef(0.5, kl=0.0, **settings) == pytest.approx(0.5 * 0.98)


def test_the_adaptive_kl_coefficient_stays_positive_where_the_horizon_is_short() -> None:
    assert adapted_coef(0.05, kl=0.0, num_episodes=512, target=0.1, horizon=100) == pytest.approx(0.005)
    assert adapted_coef(0.005, kl=9.0, num_episodes=512, target=0.1, horizon=100) > 0.005, "and it can rise again"


def test_the_gradients_of_the_kl_estimators_are_those_of_their_formulas() -> None:
    for name, gradient in (("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1 - float(np.exp(-0.5)))):
        logprobs = torch.tensor([-1.0], requires_grad=True)
        kl_estimate(logprobs, torch.tensor([-1.5]), name).sum().backward()  # type: ignore[arg-type]
        assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6), name


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


def test_k1_belongs_into_the_reward_and_k2_or_k3_into_the_loss() -> None:
    """Exact expectations over three tokens: what each estimator does to the logits, as a reward and as a loss."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log().requires_grad_()
    ref = torch.tensor([0.5, 0.1, 0.4])
    p = logits.detach().softmax(0)

    def gradient_of(objective: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(objective, logits)[0]

    def logp() -> torch.Tensor:
        return logits.log_softmax(0)

    towards = gradient_of((logp().exp() * (logp() - ref.log())).sum())  # of KL(policy || ref)
    backwards = gradient_of(-(ref * logp()).sum())  # of KL(ref || policy)
    in_reward = {
        name: gradient_of((p * kl_estimate(p.log(), ref.log(), name) * logp()).sum())  # type: ignore[arg-type]
        for name in ("k1", "k2", "k3", "abs")
    }
    in_loss = {name: gradient_of((p * kl_estimate(logp(), ref.log(), name)).sum()) for name in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    torch.testing.assert_close(in_reward["k1"], towards)
    torch.testing.assert_close(in_loss["k2"], towards)
    torch.testing.assert_close(in_loss["k3"], backwards)
    torch.testing.assert_close(in_loss["k1"], torch.zeros(3))
    for name in ("k2", "k3", "abs"):
        assert (in_reward[name] * towards < 0).any(), f"{name} pushes a logit the wrong way"


def test_kl_in_reward_lowers_every_token_and_the_score_stands_on_the_last() -> None:
    plain = token_rewards([1.0, -2.0], [3, 1])
    assert [r.tolist() for r in plain] == [[0, 0, 1], [-2]]
    with_kl = token_rewards([1.0, -2.0], [3, 1], kl=[np.array([0.1, 0.2, 0.3]), np.array([0.5])], beta=0.1)
    np.testing.assert_allclose(with_kl[0], [-0.01, -0.02, 0.97])
    np.testing.assert_allclose(with_kl[1], [-2.05])


def test_token_rewards_are_of_one_row_each_and_keep_their_digits() -> None:
    for rewards, lengths in (([1.0], [1, 2]), ([1.0, 2.0], [1])):
        with pytest.raises(ValueError, match="argument 2 is"):
            token_rewards(rewards, lengths)
    [row] = token_rewards([1e-9], [1], kl=[np.array([1.0], dtype=np.float32)], beta=1.0)
    assert row.dtype == np.float64 and row[0] == 1e-9 - 1
    [unpenalised] = token_rewards([1.0], [2], kl=[np.array([5.0, 5.0])])
    assert unpenalised.tolist() == [0.0, 1.0], "without a coefficient the KL costs nothing"
    with pytest.raises(AssertionError, match="row 0: 2 completion tokens but kl of shape"):
        token_rewards([1.0], [2], kl=[np.array([0.1])], beta=0.1)


@pytest.mark.parametrize(
    ("policy", "ratio", "advantage", "loss"),
    [
        ("ppo_clip", 1.5, 1.0, -1.4),
        ("ppo_clip", 0.5, -1.0, 0.9),
        ("ppo_clip", 5.0, -1.0, 2.0),
        ("gspo", 1.5, 1.0, -1.4),
        ("gspo", 0.5, -1.0, 0.9),
        ("cispo", 1.5, 1.0, -1.4 * float(np.log(1.5))),
        ("cispo", 0.5, 1.0, -0.9 * float(np.log(0.5))),
    ],
)
def test_the_clips_of_the_config_are_those_of_the_loss(
    policy: str, ratio: float, advantage: float, loss: float
) -> None:
    settings = LossConfig(policy=policy, clip_low=0.1, clip_high=0.4, dual_clip=2.0)
    given = (torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([advantage]), ONE_ROW)
    assert policy_loss(*given, loss=settings)[0].item() == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_a_token_at_its_old_probability_is_not_clipped(policy: str) -> None:
    given = (torch.tensor([-1.0]), torch.tensor([-1.0]), torch.ones(1), ONE_ROW)
    assert policy_loss(*given, loss=LossConfig(policy=policy))[1]["clip_share"].item() == 0
