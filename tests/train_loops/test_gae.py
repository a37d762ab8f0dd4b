"""gae and whiten give literal numbers worked out by hand, and masked tokens and the order of rows do not change them."""

import numpy as np
import pytest

from train_loops.advantages.gae import gae, whiten
from train_loops.signal.kl import token_rewards

pytestmark = pytest.mark.fast

R, V = [0.0, 0.0, 1.0], [0.1, 0.2, 0.3]
A, G = [0.82675, 0.765, 0.7], [0.92675, 0.965, 1.0]


def test_gae_and_whitening_have_their_literal_values() -> None:
    advantages, returns = gae([np.array(R)], [np.array(V)], trajectories=[[0]], gamma=1, gae_lambda=0.95)
    np.testing.assert_allclose(advantages[0], A, atol=1e-6)
    np.testing.assert_allclose(returns[0], G, atol=1e-6)
    np.testing.assert_allclose(whiten(advantages)[0], [0.991343, 0.017092, -1.008435], atol=1e-6)


def test_chained_gae_runs_through_an_episodes_turns_and_ended_gae_stops_at_each() -> None:
    rewards, values = [np.array([0.0]), np.array([0.0, 1.0])], [np.array([0.3]), np.array([0.1, 0.2])]
    chained, returns = gae(rewards, values, trajectories=[[1, 0]], gamma=1, gae_lambda=0.95)
    # Row 1 (two tokens, reward 1 on its last), then row 0 (one token): r = [0, 1, 0], V = [.1, .2, .3].
    # A_2 = -.3; A_1 = 1 + .3 - .2 + .95 * -.3 = .815; A_0 = .2 - .1 + .95 * .815 = .87425
    np.testing.assert_allclose(chained[1], [0.87425, 0.815])
    np.testing.assert_allclose(chained[0], [-0.3])
    np.testing.assert_allclose(returns[1], [0.97425, 1.015])
    ended, _ = gae(rewards, values, trajectories=[[0], [1]], gamma=1, gae_lambda=0.95)
    # Row 1 alone: A_1 = 1 - .2 = .8; A_0 = .2 - .1 + .95 * .8 = .86
    np.testing.assert_allclose(ended[1], [0.86, 0.8])
    np.testing.assert_allclose(ended[0], [-0.3])


def test_an_increment_is_paid_to_every_earlier_turn_and_a_return_only_to_its_own() -> None:
    rewards = token_rewards([0.25, 0.5], [2, 2])
    zeros = [np.zeros(2), np.zeros(2)]
    chained, _ = gae(rewards, zeros, trajectories=[[0, 1]], gamma=1, gae_lambda=1)
    ended, _ = gae(rewards, zeros, trajectories=[[0], [1]], gamma=1, gae_lambda=1)
    assert [a.tolist() for a in chained] == [[0.75, 0.75], [0.5, 0.5]]
    assert [a.tolist() for a in ended] == [[0.25, 0.25], [0.5, 0.5]]


def masked_gae(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The reference's loop over all positions, in which masked ones carry value and advantage over."""
    next_value = last = 0.0
    out = np.zeros(len(mask))
    for t in reversed(range(len(mask))):
        delta = rewards[t] + gamma * next_value - values[t]
        candidate = delta + gamma * lam * last
        next_value = values[t] if mask[t] else next_value
        last = candidate if mask[t] else last
        out[t] = last
    return out


def test_inserting_masked_tokens_leaves_gae_unchanged() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        mask = rng.random(20) < 0.5
        mask[rng.integers(20)] = True
        rewards, values = rng.normal(size=20) * mask, rng.normal(size=20)
        want = masked_gae(rewards, values, mask, 0.9, 0.8)[mask]
        parts = np.array_split(np.flatnonzero(mask), 3)  # three turns with other tokens between and inside them
        parts = [p for p in parts if len(p)]
        got, _ = gae(
            [rewards[p] for p in parts],
            [values[p] for p in parts],
            trajectories=[list(range(len(parts)))],
            gamma=0.9,
            gae_lambda=0.8,
        )
        np.testing.assert_allclose(np.concatenate(got), want)


def test_gae_rows_do_not_depend_on_their_order_or_their_neighbours() -> None:
    rng = np.random.default_rng(1)
    rewards = [rng.normal(size=n) for n in (4, 1, 7, 2, 5)]
    values = [rng.normal(size=len(r)) for r in rewards]
    chains = [[0, 2], [1], [4, 3]]
    want, _ = gae(rewards, values, trajectories=chains, gamma=0.97, gae_lambda=0.9)
    order = [3, 0, 4, 2, 1]
    at = {row: i for i, row in enumerate(order)}
    got, _ = gae(
        [rewards[i] for i in order],
        [values[i] for i in order],
        trajectories=[[at[row] for row in chain] for chain in reversed(chains)],
        gamma=0.97,
        gae_lambda=0.9,
    )
    for row in range(5):
        np.testing.assert_allclose(got[at[row]], want[row])


def test_whitening_per_agent_takes_each_agent_by_itself_and_one_token_becomes_zero() -> None:
    rows = [np.array([1.0, 3.0]), np.array([100.0]), np.array([5.0])]
    together = np.concatenate(whiten(rows))
    assert together.mean() == pytest.approx(0, abs=1e-12)
    assert together.std(ddof=1) == pytest.approx(1)
    per_agent = whiten(rows, labels=["a", "b", "a"])
    np.testing.assert_allclose(np.concatenate([per_agent[0], per_agent[2]]), [-1, 0, 1], atol=1e-8)
    assert per_agent[1].tolist() == [0.0]


def test_whitening_keeps_what_is_not_a_number() -> None:
    assert np.isnan(whiten([np.array([1.0]), np.array([np.nan])])).all(), "zeros would hide a critic that is broken"
