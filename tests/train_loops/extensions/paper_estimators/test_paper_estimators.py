"""The estimators of papers give literal numbers worked out by hand. (What all estimators have in common: test_advantages.py.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from advantage_rows import per_row, rows, table_of, table_rows
from hypothesis import given

from train_loops.config import AdvantageConfig
from train_loops.estimators import ESTIMATORS
from train_loops.extensions.paper_estimators import gigpo
from train_loops.extensions.paper_estimators.gigpo import figures
from train_loops.extensions.paper_estimators.nll_gain import gains_of, nll_gain

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


def test_gigpo_adds_the_comparison_of_turns_that_saw_the_same() -> None:
    table = rows(
        [0.0, 1.0, 0.0, 0.0],
        episodes=["0", "0", "1", "1"],
        turns=[0, 1, 0, 1],
        prompts=[[7], [8, 1], [7], [9, 9]],
        credit_kind="increments",
    )
    got = per_row("gigpo", table, ddof=0, eps=1e-12)
    # Episodes are worth .5 and 0: +-1. Turn 0: returns .95 and 0 behind the prompt [7]: +-1. Turn 1: alone behind theirs.
    np.testing.assert_allclose(got, [2.0, 1.0, -2.0, -1.0])
    np.testing.assert_allclose(per_row("gigpo", table, ddof=0, eps=1e-12, step_weight=0.5), [1.5, 1.0, -1.5, -1.0])


def test_gigpo_takes_a_reward_that_stands_for_the_rest_of_the_episode_as_the_step_return() -> None:
    paid: dict[str, Any] = {"episodes": ["0", "0", "1", "1"], "turns": [0, 1, 0, 1], "prompts": [[7], [8], [7], [8]]}
    table = rows([1.0, 1.0, 0.0, 1.0], **paid, credit_kind="returns")
    # Episodes are worth 1 and .5: +-1. Behind [7] 1 and 0: +-1; behind [8] 1 and 1, whatever turn 0 was paid: 0.
    np.testing.assert_allclose(per_row("gigpo", table, ddof=0, eps=1e-12), [2.0, 1.0, -2.0, -1.0])
    summed = rows([1.0, 1.0, 1.0, 0.0], **paid, credit_kind="increments")
    as_returns = rows([1.0, 1.0, 1.0, 0.0], **paid, credit_kind="returns")
    # Increments: 1.95 and 1 behind [7]; as returns 1 and 1.
    np.testing.assert_allclose(per_row("gigpo", summed, ddof=0, eps=1e-12), [2.0, 2.0, -2.0, -2.0])
    np.testing.assert_allclose(per_row("gigpo", as_returns, ddof=0, eps=1e-12), [1.0, 2.0, -1.0, -2.0])


def test_the_share_of_turns_with_an_anchor_says_how_much_of_gigpo_there_is() -> None:
    shares = [
        figures(rows([0.0] * 4, prompts=prompts), AdvantageConfig())["train/anchor_share"]
        for prompts in ([[1], [1], [1], [2]], [[1], [2], [3], [4]])
    ]
    assert shares == [0.75, 0.0]


def test_gigpo_compares_turns_that_acted_in_one_state_of_the_world_whatever_their_prompts() -> None:
    about: dict[str, Any] = {"episodes": ["0", "1", "2"], "credit_kind": "returns"}
    table = rows([1.0, 0.0, 0.0], **about, prompts=[[1], [2], [2]], states=["s", "s", "t"])
    by_state, by_prompt = (per_row("gigpo", table, anchor=anchor, ddof=0, eps=1e-12) for anchor in ("state", "prompt"))
    episodes = per_row("grpo", table, ddof=0, eps=1e-12)
    np.testing.assert_allclose(by_state - episodes, [1.0, -1.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(by_prompt - episodes, [0.0, 0.0, 0.0], atol=1e-9)
    # A turn of an episode without a world is compared by its prompt.
    mixed = rows([1.0, 0.0, 0.0], **about, prompts=[[1], [2], [1]], states=["", "s", ""])
    np.testing.assert_allclose(per_row("gigpo", mixed, ddof=0, eps=1e-12) - episodes, [1.0, 0.0, -1.0], atol=1e-9)


def test_gigpo_takes_prompts_that_are_alike_enough_for_one_anchor() -> None:
    alike = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]  # ratio .9
    table = rows([1.0, 0.0], prompts=alike)
    apart, together = (per_row("gigpo", table, similarity=s)[0] for s in (0.95, 0.9))
    assert together == pytest.approx(2 * apart)


def test_gigpo_feels_a_constant_added_to_every_reward_as_its_returns_do() -> None:
    two_turns = {"episodes": ["0", "0", "1"], "turns": [0, 1, 0], "credit_kind": "increments"}
    table, shifted = rows([1.0, 0.0, 0.0], **two_turns), rows([3.0, 2.0, 2.0], **two_turns)
    settings = {"normalize_std": False, "step_gamma": 0.5}
    # Returns behind the one prompt: [1, 0, 0], then [3 + 1, 2, 2]; episodes: [1, 1, 0], then [5, 5, 2].
    episode = np.array([0.5, 0.5, -0.5])
    np.testing.assert_allclose(per_row("gigpo", table, **settings), episode + np.array([2, -1, -1]) / 3)
    np.testing.assert_allclose(per_row("gigpo", shifted, **settings), 3 * episode + np.array([4, -2, -2]) / 3)


def test_the_nll_gain_has_its_literal_values() -> None:
    nll = [0.2, 0.4, 0.9, 0.5, 0.5]
    np.testing.assert_allclose(gains_of(nll, keys=["g"] * 5, alpha=0.25), [1.38943, 1.11587, 0.64498, 1, 1], atol=1e-5)
    assert gains_of([0.2, 0.7, 0.7], keys=["a", "b", "b"], alpha=0.25).tolist() == [1, 1, 1]
    assert np.isnan(gains_of([0.2, float("nan")], keys=["a", "a"], alpha=0.25)).all()
    by_length = nll_gain([np.array([-0.2] * 9), np.array([-0.4]), np.array([-0.9] * 3)], keys=["g"] * 3, alpha=0.25)
    np.testing.assert_allclose(by_length, gains_of([0.2, 0.4, 0.9], keys=["g"] * 3, alpha=0.25))


def test_rows_that_differ_by_the_trainers_noise_have_no_nll_gain() -> None:
    assert gains_of([0.5, 0.5 + 1e-7, 0.5019], keys=["g"] * 3, alpha=1.0).tolist() == [1, 1, 1]


def test_a_lead_that_is_rounding_is_none() -> None:
    assert per_row("pass_at_k", rows([0.3, 0.1 + 0.2, 0.0]), eps=1e-12).tolist() == [0, 0, 0]


def test_prompts_are_compared_where_a_state_is_missing_and_only_if_they_may_be_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(gigpo.SequenceMatcher, "ratio", lambda matcher: compared.append(matcher) or 0.0)
    other = [[1] * 5, [2] * 5, [3] * 9]
    per_row("gigpo", rows([1.0, 0.0, 0.5], prompts=other), similarity=0.9)
    per_row("gigpo", rows([1.0, 0.0], prompts=[[1] * 9 + [2], [1] * 9 + [3]], states=["s", "t"]), similarity=0.9)
    assert not compared
    per_row("gigpo", rows([1.0, 0.0], prompts=[[1] * 9 + [2], [1] * 9 + [3]]), similarity=0.9)
    assert len(compared) == 1
