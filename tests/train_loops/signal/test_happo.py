"""HAPPO: the factor M against a slow reference, its limits, and the order of updates."""

from __future__ import annotations

import math

import pytest
import torch

from train_loops.signal.happo import log_factor, update_order
from train_loops.signal.losses import ppo_clip

pytestmark = pytest.mark.fast


def test_m_is_the_product_over_updated_groups_turns_and_tokens() -> None:
    before = {"solver": {"e": [[-1.0, -2.0], [-0.5]]}, "critic": {"e": [[-0.3]], "f": [[-2.0]]}}
    after = {"solver": {"e": [[-1.1, -1.9], [-0.4]]}, "critic": {"e": [[-0.35]], "f": [[-1.5]]}}
    ratios = []
    product = {"e": 1.0, "f": 1.0}
    for group, episodes in before.items():
        ratios.append({})
        for episode, turns in episodes.items():
            total = 0.0
            for i, turn in enumerate(turns):
                for t, logprob in enumerate(turn):
                    total += after[group][episode][i][t] - logprob
                    product[episode] *= math.exp(after[group][episode][i][t]) / math.exp(logprob)
            ratios[-1][episode] = total
    factors = log_factor(ratios, limit=10.0)
    assert {e: math.exp(x) for e, x in factors.items()} == pytest.approx(product)


def test_log_m_is_clipped_and_an_episode_in_which_nobody_was_updated_has_none() -> None:
    assert log_factor([], limit=0.7) == {}
    factors = log_factor([{"e": 2.0, "f": -0.2}, {"e": 1.0, "g": -3.0}], limit=math.log(2))
    assert factors == pytest.approx({"e": math.log(2), "f": -0.2, "g": -math.log(2)})


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.5])
def test_the_weighed_loss_and_its_gradient_are_those_of_a_slow_reference(advantage: float) -> None:
    m = 1.1
    logprobs = torch.tensor([0.25, -0.1, 0.05], dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_clip(logprobs, torch.zeros(3, dtype=torch.float64), torch.full((3,), m * advantage), dual_clip=None)
    loss.sum().backward()
    for got, x in zip(logprobs.grad.tolist(), logprobs.detach().tolist(), strict=True):
        ratio, h = math.exp(x), 1e-6

        def slow(x: float) -> float:
            r = math.exp(x)
            return -m * min(r * advantage, min(max(r, 0.8), 1.2) * advantage)

        want = (slow(x + h) - slow(x - h)) / (2 * h)
        assert got == pytest.approx(want, abs=1e-5), ratio


def test_the_order_is_seeded_and_drawn_anew_in_each_iteration() -> None:
    groups = ["a", "b", "c", "d"]
    orders = [update_order(groups, seed=0, iteration=k, order="random") for k in range(1, 20)]
    assert orders == [update_order(groups, seed=0, iteration=k, order="random") for k in range(1, 20)]
    assert len({tuple(order) for order in orders}) > 5 and all(sorted(order) == groups for order in orders)
    assert update_order(groups, seed=0, iteration=3, order="fixed") == groups
