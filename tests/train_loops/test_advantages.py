"""The group estimators give literal numbers worked out by hand; what must change them does, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from advantage_rows import per_row, rows, table_of, table_rows, there
from hypothesis import given
from hypothesis import strategies as st

from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig
from train_loops.estimators import ESTIMATORS

pytestmark = pytest.mark.fast

AGAINST_BASELINE = "leave_one_out"
"""One name of three: see `test_the_estimators_against_variants_differ_in_the_variant_only`."""


A_REWARDS, A_EPISODES = [1.0, 1.0, 0.0, 1.0, 0.0], ["0", "0", "1", "2", "3"]
B_REWARDS, B_EPISODES = [1.0, 1.0, 0.0], ["0", "2", "3"]


def two_agents() -> RewardedRows:
    """Four episodes of one task earn 1, 0, 1, 0; A is called 2, 1, 1, 1 times, B 1, 0, 1, 1."""
    return rows(A_REWARDS + B_REWARDS, episodes=A_EPISODES + B_EPISODES, agents=["A"] * 5 + ["B"] * 3)


def test_dr_mas_has_its_literal_values() -> None:
    got = per_row("dr_mas", two_agents())
    np.testing.assert_allclose(got[:5], [0.730295, 0.730295, -1.095443, 0.730295, -1.095443], atol=1e-6)
    np.testing.assert_allclose(got[5:], [0.577349, 0.577349, -1.154699], atol=1e-6)
    paper = per_row("dr_mas", rows(A_REWARDS, episodes=A_EPISODES), ddof=0)
    np.testing.assert_allclose(paper, [0.816495, 0.816495, -1.224742, 0.816495, -1.224742], atol=1e-6)


def test_grpo_over_episodes_gives_every_row_its_episodes_advantage() -> None:
    got = per_row("grpo", two_agents())
    np.testing.assert_allclose(got, [0.866024 if s else -0.866024 for s in A_REWARDS + B_REWARDS], atol=1e-6)


def test_grpo_averages_an_episodes_rows_before_it_compares() -> None:
    got = per_row("grpo", rows([1.0, 0.0, 0.0, 1.0, 1.0], episodes=["0", "0", "1", "2", "2"]), ddof=0)
    s = np.array([0.5, 0.0, 1.0])
    np.testing.assert_allclose(got, ((s - s.mean()) / (s.std() + 1e-6))[[0, 0, 1, 2, 2]])


def test_without_the_standard_deviation_grpo_is_dr_grpo() -> None:
    assert per_row("grpo", rows([1.0, 0.0, 0.0, 1.0]), normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_rloo_has_its_literal_values() -> None:
    np.testing.assert_allclose(per_row("rloo", rows([1.0, 0.0, 0.0, 1.0])), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_the_estimators_against_variants_differ_in_the_variant_only() -> None:
    assert len({ESTIMATORS[name].function for name in ("remax", "counterfactual", AGAINST_BASELINE)}) == 1


def test_against_a_baseline_each_token_gets_what_is_still_to_come_minus_what_the_variant_earned() -> None:
    table = RewardedRows(
        token_rewards=[np.array([-0.1, -0.2, 1.0]), np.array([1.0])],
        group_ids=["g", "g"],
        episode_ids=["0", "1"],
        agents=["a", "a"],
        turn_indices=[0, 0],
        round_indices=[0, 0],
        episode_rounds=[0, 0],
        baselines=[0.5, None],
    )
    got = ESTIMATORS[AGAINST_BASELINE](table, AdvantageConfig())
    np.testing.assert_allclose(got[0], [0.2, 0.3, 0.5])
    assert got[1].tolist() == [0.0], "a turn without a variant has nothing to be compared with"


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_siblings_that_earned_the_same_give_exactly_zero_whatever_the_rounding(reward: float) -> None:
    table = rows([reward] * 2, lengths=[1, 3], baselines=[(reward + reward + reward) / 3] * 2)
    assert [a.tolist() for a in ESTIMATORS[AGAINST_BASELINE](table, AdvantageConfig())] == [[0], [0, 0, 0]]


@pytest.mark.parametrize("name", there("grpo", "rloo", "pass_at_k"))
def test_an_episode_of_increments_is_worth_their_sum_however_many_turns_it_took(name: str) -> None:
    """One right at once, one that lost the answer in its third turn, one in its sixth: the last two are as bad."""
    episodes = ["0"] * 2 + ["1"] * 3 + ["2"] * 6
    table = rows([0.0] * 4 + [-1.0] + [0.0] * 5 + [-1.0], episodes=episodes, credit_kind="increments")
    short, late = (per_row(name, table)[i] for i in (2, 5))
    assert short == pytest.approx(late) and per_row(name, table)[0] > short


@pytest.mark.parametrize("name", there("grpo", "dr_mas", "at_grpo", "rloo", "gpg", "opo"))
def test_a_singleton_is_zero_unless_the_references_raw_reward_is_asked_for(name: str) -> None:
    alone = rows([0.7])
    assert per_row(name, alone).tolist() == [0]
    assert per_row(name, alone, singleton="raw").tolist() == [pytest.approx(0.7)]


def test_a_singleton_may_be_held_against_all_turns_of_its_agent() -> None:
    table = rows([3.0, 1.0, 2.0, 50.0], groups=["g", "h", "i", "g"], agents=["a", "a", "a", "b"])
    got = per_row("dr_mas", table, singleton="batch", normalize_std=False)
    np.testing.assert_allclose(got, [1.0, -1.0, 0.0, 0.0])


@pytest.mark.parametrize("name", there("dr_mas", "at_grpo", "opo", "gpg", "reinforce_pp_baseline", "rloo", "grpo"))
def test_a_single_turn_is_held_against_those_of_its_agent_whatever_others_earn(name: str) -> None:
    table = rows([1.0, 2.0, 11.0, 12.0], groups=list("1234"), agents=list("aabb"))
    settings = {"group_by": "task_agent"} if name in ("rloo", "grpo") else {}
    whiten = {"whiten": "none"} if name == "reinforce_pp_baseline" else {}
    got = per_row(name, table, singleton="batch", normalize_std=False, **settings, **whiten)
    np.testing.assert_allclose(got, [-0.5, 0.5, -0.5, 0.5])


@pytest.mark.parametrize(
    ("group_by", "want"),
    [
        ("task", [1.5, -0.5, 0.5, -1.5]),  # turns, not episodes: mean of 4, 2, 3, 1
        ("task_agent", [1.0, -1.0, 1.0, -1.0]),
        ("task_round", [0.5, 0.5, -0.5, -0.5]),
        ("task_agent_round", [0.0, 0.0, 0.0, 0.0]),
        ("batch_agent", [1.0, -1.0, 1.0, -1.0]),
    ],
)
def test_what_is_compared_is_a_setting(group_by: str, want: list[float]) -> None:
    table = rows([4.0, 2.0, 3.0, 1.0], agents=["a", "a", "b", "b"], calls=[0, 1, 0, 1], rounds=[0, 1, 0, 1])
    np.testing.assert_allclose(per_row("dr_mas", table, group_by=group_by, normalize_std=False), want)


@pytest.mark.parametrize("name", there(but=(AGAINST_BASELINE,)))
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(name: str) -> None:
    assert per_row(name, rows([0.1] * 3)).tolist() == [0, 0, 0]
    assert per_row(name, rows([0.3, 0.1 + 0.2]), eps=1e-12).tolist() == [0, 0]


@pytest.mark.parametrize("name", there(but=(AGAINST_BASELINE, "gigpo")))
def test_equal_rewards_give_exactly_zero_however_often_an_agent_was_called(name: str) -> None:
    calls = ["0"] * 3 + ["1"] + ["2"] * 6  # .1 * 3 / 3 is not .1 in floating point
    table = rows([0.1] * 10, episodes=calls, agents=["a", "b"] * 5)
    assert per_row(name, table).tolist() == [0] * 10


@pytest.mark.parametrize("name", there(but=(AGAINST_BASELINE, "pass_at_k")))
def test_what_is_not_a_number_stays_so_and_is_never_taken_for_no_signal(name: str) -> None:
    assert np.isnan(per_row(name, rows([1.0, float("nan"), 0.0]))).all()


@pytest.mark.parametrize("name", there("grpo", "gigpo"))
def test_an_episode_comparison_may_be_made_per_agent_as_dr_mas_does(name: str) -> None:
    got = per_row(name, two_agents(), group_by="task_agent", **({"step_weight": 0.0} if name == "gigpo" else {}))
    np.testing.assert_allclose(got, per_row("dr_mas", two_agents()))


def test_a_constant_added_to_every_reward_acts_as_the_formula_says_where_it_is_felt() -> None:
    two_turns = {"episodes": ["0", "0", "1"], "turns": [0, 1, 0], "baselines": [0.5, None, 0.5]}
    table, shifted = rows([1.0, 0.0, 0.0], **two_turns), rows([3.0, 2.0, 2.0], **two_turns)
    assert (per_row(AGAINST_BASELINE, shifted) - per_row(AGAINST_BASELINE, table)).tolist() == [2.0, 0.0, 2.0]


def picked(table: RewardedRows, order: list[int]) -> RewardedRows:
    fields = {name: getattr(table, name) for name in RewardedRows.__dataclass_fields__}
    return RewardedRows(**fields | {n: [of[i] for i in order] for n, of in fields.items() if n != "credit_kind"})


def changed(table: RewardedRows, change: Any) -> RewardedRows:
    return replace(table, token_rewards=[np.concatenate([r[:-1], [change(r[-1])]]) for r in table.token_rewards])


@pytest.mark.parametrize("name", there())
@given(drawn=table_rows, random=st.randoms(use_true_random=False))
def test_rows_in_another_order_have_the_same_advantages(name: str, drawn: list, random: Any) -> None:
    table = table_of(drawn)
    order = list(range(len(drawn)))
    random.shuffle(order)
    np.testing.assert_allclose(per_row(name, picked(table, order)), per_row(name, table)[order], atol=1e-9)


@pytest.mark.parametrize("name", there())
@given(drawn=table_rows)
def test_names_of_tasks_episodes_and_agents_mean_nothing(name: str, drawn: list) -> None:
    table = table_of(drawn)
    renamed = {
        field: [f"~{label[::-1]}" for label in getattr(table, field)]
        for field in ("group_ids", "episode_ids", "agents")
    }
    np.testing.assert_array_equal(per_row(name, replace(table, **renamed)), per_row(name, table))


# gpg counts rewards that are not 0, gigpo's returns grow with the turns that are left, and a baseline stays where it is.
@pytest.mark.parametrize("name", there(but=(AGAINST_BASELINE, "gpg", "gigpo")))
@given(drawn=table_rows)
def test_a_constant_added_to_every_reward_changes_nothing(name: str, drawn: list) -> None:
    table = table_of(drawn)
    got = per_row(name, changed(table, lambda r: r + 3.0))
    np.testing.assert_allclose(got, per_row(name, table), atol=1e-7)


@pytest.mark.parametrize("name", there())
@given(drawn=table_rows)
def test_rewards_twice_as_large_count_twice_without_a_standard_deviation_and_the_same_with_it(
    name: str, drawn: list
) -> None:
    table = table_of(drawn)
    table = replace(table, baselines=[None if b is None else 0.0 for b in table.baselines])
    twice = changed(table, lambda r: 2 * r)
    plain = {"normalize_std": False, "whiten": "none"}
    np.testing.assert_allclose(per_row(name, twice, **plain), 2 * per_row(name, table, **plain), atol=1e-9)
    if name not in (AGAINST_BASELINE, "rloo", "opo", "gpg"):  # they have no standard deviation
        divided = {"eps": 1e-12}
        np.testing.assert_allclose(per_row(name, twice, **divided), per_row(name, table, **divided), atol=1e-4)


@given(drawn=table_rows)
def test_the_advantages_of_a_task_and_agent_sum_to_zero(drawn: list) -> None:
    got = per_row("dr_mas", table_of(drawn))
    for key in {d[:2] for d in drawn}:
        assert got[[i for i, d in enumerate(drawn) if d[:2] == key]].sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", there("grpo", "dr_mas", "at_grpo", "rloo", "gigpo", "pass_at_k", "opo"))
@given(drawn=table_rows)
def test_a_task_knows_nothing_of_the_others(name: str, drawn: list) -> None:
    table = table_of(drawn)
    of_g = [i for i, d in enumerate(drawn) if d[0] == "g"]
    if of_g:
        np.testing.assert_allclose(per_row(name, picked(table, of_g)), per_row(name, table)[of_g], atol=1e-9)


@pytest.mark.parametrize("name", there(but=("opo", "reinforce_pp", "reinforce_pp_baseline")))
@given(drawn=table_rows)
def test_lengths_change_nothing_but_where_the_formula_has_them(name: str, drawn: list) -> None:
    table = table_of(drawn)
    longer = replace(table, token_rewards=[np.concatenate([[0.0, 0.0], r]) for r in table.token_rewards])
    np.testing.assert_allclose(per_row(name, longer), per_row(name, table), atol=1e-9)


@pytest.mark.parametrize(("name", "want"), [("rloo", [1, -1, 0.5, -0.5, 0.7]), ("grpo", [0.5, -0.5, 0.25, -0.25, 0.7])])
def test_turns_are_compared_where_the_setting_says_so(name: str, want: list[float]) -> None:
    table = rows([1.0, 0.0, 0.5, 0.0, 0.7], agents=["a", "a", "b", "b", "c"])
    got = per_row(name, table, group_by="task_agent", normalize_std=False, singleton="raw")
    np.testing.assert_allclose(got, want)
