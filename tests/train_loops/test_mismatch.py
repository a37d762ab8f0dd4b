"""mismatch: agreement per agent, and the three decisions."""

import numpy as np
import pytest

from train_loops.config import MismatchConfig
from train_loops.mismatch import MismatchError, decide, measure, truncated_weights

CONFIG = MismatchConfig(tolerance_mean=0.01, tolerance_max=0.05, limit_mean=0.1, truncation=2.0)


def agreements(*differences: float, agent: str = "solver"):
    rollout = np.full(len(differences), -1.0)
    return measure([rollout + differences], [rollout], [agent], config=CONFIG)


def test_equal_logprobs_agree_fully() -> None:
    a = agreements(0.0, 0.0, 0.0)["solver"]
    assert (a.num_tokens, a.mean_abs, a.max_abs, a.kl_k1, a.kl_k3, a.share_beyond) == (3, 0, 0, 0, 0, 0)
    assert a.ess == 1
    assert decide(agreements(0.0), config=CONFIG) == "none"


def test_the_figures_of_two_tokens_are_their_literal_values() -> None:
    a = agreements(np.log(2), -np.log(2))["solver"]  # weights 2 and 1/2
    assert a.mean_abs == pytest.approx(np.log(2))
    assert a.kl_k1 == pytest.approx(0)
    assert a.kl_k3 == pytest.approx(0.25)
    assert a.ess == pytest.approx(2.5**2 / (2 * 4.25))
    assert a.share_beyond == 1


def test_agents_are_measured_apart_and_rows_of_one_agent_together() -> None:
    got = measure([[-1.0], [-1.0, -1.0], [-3.0]], [[-1.0], [-1.0, -1.2], [-3.0]], ["a", "b", "a"], config=CONFIG)
    assert (got["a"].num_tokens, got["b"].num_tokens) == (2, 2)
    assert got["a"].max_abs == 0
    assert (got["b"].max_abs, got["b"].kl_k1, got["b"].share_beyond) == (pytest.approx(0.2), pytest.approx(-0.1), 0.5)


def test_one_far_token_or_many_near_ones_call_for_truncated_weights() -> None:
    assert decide(agreements(*[0.0] * 99, 0.06), config=CONFIG) == "truncate"
    assert decide(agreements(*[0.02] * 5), config=CONFIG) == "truncate"
    assert decide(agreements(*[0.005] * 5), config=CONFIG) == "none"


@pytest.mark.parametrize("difference", [0.2, -0.2, float("nan")])
def test_beyond_the_limit_the_error_names_agent_number_and_limit(difference: float) -> None:
    measured = {**agreements(0.0, agent="fine"), **agreements(difference, agent="verifier")}
    with pytest.raises(MismatchError, match=r"'verifier'.* (0\.2|nan) nats.*limit_mean=0\.1"):
        decide(measured, config=CONFIG)


def test_truncated_weights_are_capped_above_only() -> None:
    (w,) = truncated_weights([[0.0, -5.0, -1.0]], [[-3.0, -1.0, -1.5]], cap=2.0)
    np.testing.assert_allclose(w, [2.0, np.exp(-4), np.exp(0.5)])
