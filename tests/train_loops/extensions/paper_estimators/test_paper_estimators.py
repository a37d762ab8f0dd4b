"""The estimators of papers give literal numbers worked out by hand. (What all estimators have in common: test_advantages.py.)"""

from __future__ import annotations

import numpy as np
import pytest
from advantage_rows import per_row, rows, table_of, table_rows
from hypothesis import given

from train_loops.config import AdvantageConfig
from train_loops.estimators import ESTIMATORS

pytestmark = pytest.mark.fast


def test_at_grpo_compares_an_agents_turns_of_one_round() -> None:
    table = rows(
        [1.0, 0.0, 5.0, 9.0], episodes=["0", "1", "0", "1"], agents=["a"] * 4, calls=[0, 0, 1, 1], turns=[0, 0, 1, 1]
    )
    half = 1 / np.sqrt(2)
    np.testing.assert_allclose(per_row("at_grpo", table), [half, -half, -half, half], atol=1e-5)


def test_reinforce_pp_is_the_whitened_return_to_go_of_each_token() -> None:
    table = rows([1.0, -1.0], lengths=[3, 1])
    got = ESTIMATORS["reinforce_pp"](table, AdvantageConfig(gamma=0.5))
    returns = np.array([0.25, 0.5, 1.0, -1.0])
    want = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(got), want)
    raw = ESTIMATORS["reinforce_pp"](table, AdvantageConfig(gamma=0.5, whiten="none"))
    assert [a.tolist() for a in raw] == [[0.25, 0.5, 1.0], [-1.0]]


def test_reinforce_pp_baseline_takes_the_groups_mean_off_and_whitens_over_tokens() -> None:
    table = rows([1.0, 0.0, 5.0, 5.0], groups=["g", "g", "h", "h"], lengths=[1, 3, 1, 1])
    got = ESTIMATORS["reinforce_pp_baseline"](table, AdvantageConfig())
    centred = np.array([0.5, -0.5, -0.5, -0.5, 0.0, 0.0])
    want = (centred - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(got), want)


def test_opo_weighs_its_baseline_by_length() -> None:
    got = per_row("opo", rows([1.0, 0.0], lengths=[3, 1]))
    np.testing.assert_allclose(got, [0.25, -0.75])


def test_gpg_scales_up_for_rows_without_reward() -> None:
    np.testing.assert_allclose(per_row("gpg", rows([1.0, 0.0, 0.0, 0.0])), [3.0, -1.0, -1.0, -1.0])
    np.testing.assert_allclose(per_row("gpg", rows([3.0, 2.0, 2.0])), np.array([1.0, 0.0, 0.0]) - 1 / 3)  # alpha is 1


def test_pass_at_k_pays_the_best_episode_its_lead_over_the_second() -> None:
    scores = [0.2, 1.0, 0.6]
    lead = 0.4 / (np.std(scores, ddof=1) + 1e-6)
    np.testing.assert_allclose(per_row("pass_at_k", rows(scores)), [0, lead, 0])
    assert per_row("pass_at_k", rows([1.0, 1.0, 0.0])).tolist() == [0, 0, 0]
    assert per_row("pass_at_k", rows([1.0])).tolist() == [0]


def test_pass_at_k_per_agent_knows_no_rival_within_the_best_episode() -> None:
    table = rows([3.0, 3.0, 1.0, 5.0, 4.0], episodes=["0", "0", "1", "0", "1"], agents=["a", "a", "a", "b", "b"])
    got = per_row("pass_at_k", table, group_by="task_agent", normalize_std=False)
    assert got.tolist() == [2.0, 2.0, 0.0, 1.0, 0.0]


def test_a_single_turn_under_opo_may_be_held_against_its_agents_turns_weighed_by_length() -> None:
    table = rows([1.0, 0.0, 9.0], groups=["g", "h", "g"], agents=["a", "a", "b"], lengths=[3, 1, 1])
    got = per_row("opo", table, group_by="task_agent", singleton="batch")
    np.testing.assert_allclose(got, [0.25, -0.75, 0.0])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("over", ["all", "agent"])
@given(drawn=table_rows)
def test_what_is_whitened_has_mean_0_and_deviation_1_or_is_all_0(name: str, over: str, drawn: list) -> None:
    table = table_of(drawn)
    advantages = ESTIMATORS[name](table, AdvantageConfig(whiten=over))  # type: ignore[arg-type]
    for agent in {""} if over == "all" else set(table.agents):
        x = np.concatenate([a for a, of in zip(advantages, table.agents, strict=True) if agent in ("", of)])
        assert x.mean() == pytest.approx(0, abs=1e-7)
        # What is added below the root counts where scores are close.
        assert not x.any() or x.std(ddof=1) == pytest.approx(1, abs=1e-4)
