"""The group estimators give literal numbers worked out by hand; what must change them does, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_loops.advantages
from stores.by_name import open_by_name
from train_loops.advantages.gigpo import figures
from train_loops.advantages.rewarded_rows import RewardedRows
from train_loops.config import AdvantageConfig
from train_loops.estimators import ESTIMATORS as KNOWN

pytestmark = pytest.mark.fast

ESTIMATORS = sorted(name for name, estimator in KNOWN.items() if not estimator.critic)
AGAINST_BASELINE = ("remax", "counterfactual", "leave_one_out")
SHIFT_FREE = sorted(set(ESTIMATORS) - {*AGAINST_BASELINE, "gpg", "gigpo"})
"""A constant added to every reward changes nothing (without discount). gpg counts rewards that are not 0, gigpo's
returns grow with the turns that are left, and a baseline stays where it is: they are shown apart."""


def rows(
    scores: list[float],
    *,
    episodes: list[str] | None = None,
    groups: list[str] | None = None,
    agents: list[str] | None = None,
    **more: Any,
) -> RewardedRows:
    """One token per row unless `lengths` says otherwise; every row an episode of its own unless `episodes` does."""
    num = len(scores)
    lengths = more.pop("lengths", [1] * num)
    return RewardedRows(
        token_rewards=[np.array([0.0] * (n - 1) + [s]) for n, s in zip(lengths, scores, strict=True)],
        group_ids=groups or ["g"] * num,
        episode_ids=episodes or [str(i) for i in range(num)],
        agents=agents or ["a"] * num,
        turn_indices=more.pop("turns", list(range(num))),
        round_indices=more.pop("calls", [0] * num),
        episode_rounds=more.pop("rounds", [0] * num),
        prompts=more.pop("prompts", [[1]] * num),
        baselines=more.pop("baselines", [None] * num),
        states=more.pop("states", [""] * num),
        **more,
    )


def per_row(name: str, given_rows: RewardedRows, **changes: Any) -> np.ndarray:
    """One number per row: the advantage of its last token."""
    advantages = KNOWN[name](given_rows, AdvantageConfig(**changes))
    return np.array([np.atleast_1d(a)[-1] for a in advantages])


def test_every_estimator_is_a_file_of_its_name_and_every_file_of_one_has_a_config_name() -> None:
    folder = Path(train_loops.advantages.__file__).parent
    files = {path.stem for path in folder.glob("*.py")}
    assert set(ESTIMATORS) <= files
    assert files - set(ESTIMATORS) == {"__init__", "gae", "grouping", "rewarded_rows", "against_baseline"}
    assert all(callable(open_by_name(str(KNOWN[name].function), place="")) for name in ESTIMATORS)


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


def test_at_grpo_compares_an_agents_turns_of_one_round() -> None:
    table = rows(
        [1.0, 0.0, 5.0, 9.0], episodes=["0", "1", "0", "1"], agents=["a"] * 4, calls=[0, 0, 1, 1], turns=[0, 0, 1, 1]
    )
    half = 1 / np.sqrt(2)
    np.testing.assert_allclose(per_row("at_grpo", table), [half, -half, -half, half], atol=1e-5)


def test_rloo_has_its_literal_values() -> None:
    np.testing.assert_allclose(per_row("rloo", rows([1.0, 0.0, 0.0, 1.0])), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_reinforce_pp_is_the_whitened_return_to_go_of_each_token() -> None:
    table = rows([1.0, -1.0], lengths=[3, 1])
    got = KNOWN["reinforce_pp"](table, AdvantageConfig(gamma=0.5))
    returns = np.array([0.25, 0.5, 1.0, -1.0])
    want = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(got), want)
    raw = KNOWN["reinforce_pp"](table, AdvantageConfig(gamma=0.5, whiten="none"))
    assert [a.tolist() for a in raw] == [[0.25, 0.5, 1.0], [-1.0]]


def test_reinforce_pp_baseline_takes_the_groups_mean_off_and_whitens_over_tokens() -> None:
    table = rows([1.0, 0.0, 5.0, 5.0], groups=["g", "g", "h", "h"], lengths=[1, 3, 1, 1])
    got = KNOWN["reinforce_pp_baseline"](table, AdvantageConfig())
    centred = np.array([0.5, -0.5, -0.5, -0.5, 0.0, 0.0])
    want = (centred - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(got), want)


def test_opo_weighs_its_baseline_by_length() -> None:
    got = per_row("opo", rows([1.0, 0.0], lengths=[3, 1]))
    np.testing.assert_allclose(got, [0.25, -0.75])


def test_gpg_scales_up_for_rows_without_reward() -> None:
    np.testing.assert_allclose(per_row("gpg", rows([1.0, 0.0, 0.0, 0.0])), [3.0, -1.0, -1.0, -1.0])


def test_pass_at_k_pays_the_best_episode_its_lead_over_the_second() -> None:
    scores = [0.2, 1.0, 0.6]
    lead = 0.4 / (np.std(scores, ddof=1) + 1e-6)
    np.testing.assert_allclose(per_row("pass_at_k", rows(scores)), [0, lead, 0])
    assert per_row("pass_at_k", rows([1.0, 1.0, 0.0])).tolist() == [0, 0, 0]
    assert per_row("pass_at_k", rows([1.0])).tolist() == [0]


@pytest.mark.parametrize("name", AGAINST_BASELINE)
def test_against_a_baseline_each_token_gets_what_is_still_to_come_minus_what_the_variant_earned(name: str) -> None:
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
    got = KNOWN[name](table, AdvantageConfig())
    np.testing.assert_allclose(got[0], [0.2, 0.3, 0.5])
    assert got[1].tolist() == [0.0], "a turn without a variant has nothing to be compared with"


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


@pytest.mark.parametrize("name", ["grpo", "rloo", "pass_at_k"])
def test_an_episode_of_increments_is_worth_their_sum_however_many_turns_it_took(name: str) -> None:
    """One right at once, one that lost the answer in its third turn, one in its sixth: the last two are as bad."""
    episodes = ["0"] * 2 + ["1"] * 3 + ["2"] * 6
    table = rows([0.0] * 4 + [-1.0] + [0.0] * 5 + [-1.0], episodes=episodes, credit_kind="increments")
    short, late = (per_row(name, table)[i] for i in (2, 5))
    assert short == pytest.approx(late) and per_row(name, table)[0] > short


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


@pytest.mark.parametrize("name", ["grpo", "dr_mas", "at_grpo", "rloo", "gpg", "opo"])
def test_a_singleton_is_zero_unless_the_references_raw_reward_is_asked_for(name: str) -> None:
    alone = rows([0.7])
    assert per_row(name, alone).tolist() == [0]
    assert per_row(name, alone, singleton="raw").tolist() == [pytest.approx(0.7)]


def test_a_singleton_may_be_held_against_all_turns_of_its_agent() -> None:
    table = rows([3.0, 1.0, 2.0, 50.0], groups=["g", "h", "i", "g"], agents=["a", "a", "a", "b"])
    got = per_row("dr_mas", table, singleton="batch", normalize_std=False)
    np.testing.assert_allclose(got, [1.0, -1.0, 0.0, 0.0])


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


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - set(AGAINST_BASELINE)))
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(name: str) -> None:
    assert per_row(name, rows([0.1] * 3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {*AGAINST_BASELINE, "gigpo"}))
def test_equal_rewards_give_exactly_zero_however_often_an_agent_was_called(name: str) -> None:
    calls = ["0"] * 3 + ["1"] + ["2"] * 6  # .1 * 3 / 3 is not .1 in floating point
    table = rows([0.1] * 10, episodes=calls, agents=["a", "b"] * 5)
    assert per_row(name, table).tolist() == [0] * 10


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {*AGAINST_BASELINE, "pass_at_k"}))
def test_what_is_not_a_number_stays_so_and_is_never_taken_for_no_signal(name: str) -> None:
    assert np.isnan(per_row(name, rows([1.0, float("nan"), 0.0]))).all()


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_an_episode_comparison_may_be_made_per_agent_as_dr_mas_does(name: str) -> None:
    got = per_row(name, two_agents(), group_by="task_agent", **({"step_weight": 0.0} if name == "gigpo" else {}))
    np.testing.assert_allclose(got, per_row("dr_mas", two_agents()))


def test_pass_at_k_per_agent_knows_no_rival_within_the_best_episode() -> None:
    table = rows([3.0, 3.0, 1.0, 5.0, 4.0], episodes=["0", "0", "1", "0", "1"], agents=["a", "a", "a", "b", "b"])
    got = per_row("pass_at_k", table, group_by="task_agent", normalize_std=False)
    assert got.tolist() == [2.0, 2.0, 0.0, 1.0, 0.0]


def test_a_single_turn_under_opo_may_be_held_against_its_agents_turns_weighed_by_length() -> None:
    table = rows([1.0, 0.0, 9.0], groups=["g", "h", "g"], agents=["a", "a", "b"], lengths=[3, 1, 1])
    got = per_row("opo", table, group_by="task_agent", singleton="batch")
    np.testing.assert_allclose(got, [0.25, -0.75, 0.0])


def test_a_constant_added_to_every_reward_acts_as_the_formula_says_where_it_is_felt() -> None:
    two_turns = {"episodes": ["0", "0", "1"], "turns": [0, 1, 0], "baselines": [0.5, None, 0.5]}
    table, shifted = rows([1.0, 0.0, 0.0], **two_turns), rows([3.0, 2.0, 2.0], **two_turns)
    for name in AGAINST_BASELINE:
        assert (per_row(name, shifted) - per_row(name, table)).tolist() == [2.0, 0.0, 2.0], name
    np.testing.assert_allclose(per_row("gpg", table), 3 * (np.array([1.0, 0.0, 0.0]) - 1 / 3))
    np.testing.assert_allclose(per_row("gpg", shifted), np.array([1.0, 0.0, 0.0]) - 1 / 3)  # no reward is 0: alpha is 1
    settings = {"normalize_std": False, "step_gamma": 0.5}
    # Returns behind the one prompt: [1, 0, 0], then [3 + 1, 2, 2]; episodes: [1, 1, 0], then [5, 5, 2].
    table, shifted = (replace(t, credit_kind="increments") for t in (table, shifted))
    episode = np.array([0.5, 0.5, -0.5])
    np.testing.assert_allclose(per_row("gigpo", table, **settings), episode + np.array([2, -1, -1]) / 3)
    np.testing.assert_allclose(per_row("gigpo", shifted, **settings), 3 * episode + np.array([4, -2, -2]) / 3)


table_rows = st.lists(
    st.tuples(st.sampled_from("gh"), st.sampled_from("ab"), st.integers(0, 3), st.integers(-4, 4), st.integers(1, 3)),
    min_size=1,
    max_size=16,
)


def table_of(drawn: list) -> RewardedRows:
    groups, agents, episodes, scores, lengths = (list(column) for column in zip(*drawn, strict=True))
    return rows(
        [float(s) for s in scores],
        groups=groups,
        agents=agents,
        episodes=[f"{g}{e}" for g, e in zip(groups, episodes, strict=True)],
        lengths=lengths,
        rounds=[0] * len(drawn),
        prompts=[[n] for n in lengths],
        baselines=[0.5 if n == 1 else None for n in lengths],
        turns=list(range(len(drawn))),
    )


def picked(table: RewardedRows, order: list[int]) -> RewardedRows:
    fields = {name: getattr(table, name) for name in RewardedRows.__dataclass_fields__}
    return RewardedRows(**fields | {n: [of[i] for i in order] for n, of in fields.items() if n != "credit_kind"})


def changed(table: RewardedRows, change: Any) -> RewardedRows:
    rewards = [np.concatenate([r[:-1], [change(r[-1])]]) for r in table.token_rewards]
    same = {name: getattr(table, name) for name in RewardedRows.__dataclass_fields__}
    return RewardedRows(**same | {"token_rewards": rewards})


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=table_rows, random=st.randoms(use_true_random=False))
def test_rows_in_another_order_have_the_same_advantages(name: str, drawn: list, random: Any) -> None:
    table = table_of(drawn)
    order = list(range(len(drawn)))
    random.shuffle(order)
    np.testing.assert_allclose(per_row(name, picked(table, order)), per_row(name, table)[order], atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=table_rows)
def test_names_of_tasks_episodes_and_agents_mean_nothing(name: str, drawn: list) -> None:
    table = table_of(drawn)
    renamed = {
        field: [f"~{label[::-1]}" for label in getattr(table, field)]
        for field in ("group_ids", "episode_ids", "agents")
    }
    same = {field: getattr(table, field) for field in RewardedRows.__dataclass_fields__}
    np.testing.assert_array_equal(per_row(name, RewardedRows(**same | renamed)), per_row(name, table))


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("over", ["all", "agent"])
@given(drawn=table_rows)
def test_what_is_whitened_has_mean_0_and_deviation_1_or_is_all_0(name: str, over: str, drawn: list) -> None:
    table = table_of(drawn)
    advantages = KNOWN[name](table, AdvantageConfig(whiten=over))  # type: ignore[arg-type]
    for agent in {""} if over == "all" else set(table.agents):
        x = np.concatenate([a for a, of in zip(advantages, table.agents, strict=True) if agent in ("", of)])
        assert x.mean() == pytest.approx(0, abs=1e-7)
        assert not x.any() or x.std(ddof=1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", SHIFT_FREE)
@given(drawn=table_rows)
def test_a_constant_added_to_every_reward_changes_nothing(name: str, drawn: list) -> None:
    table = table_of(drawn)
    got = per_row(name, changed(table, lambda r: r + 3.0))
    np.testing.assert_allclose(got, per_row(name, table), atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=table_rows)
def test_rewards_twice_as_large_count_twice_without_a_standard_deviation_and_the_same_with_it(
    name: str, drawn: list
) -> None:
    table = table_of(drawn)
    table = RewardedRows(
        **{n: getattr(table, n) for n in RewardedRows.__dataclass_fields__}
        | {"baselines": [None if b is None else 0.0 for b in table.baselines]}
    )
    twice = changed(table, lambda r: 2 * r)
    plain = {"normalize_std": False, "whiten": "none"}
    np.testing.assert_allclose(per_row(name, twice, **plain), 2 * per_row(name, table, **plain), atol=1e-9)
    if name not in (*AGAINST_BASELINE, "rloo", "opo", "gpg"):  # they have no standard deviation
        divided = {"eps": 1e-12}
        np.testing.assert_allclose(per_row(name, twice, **divided), per_row(name, table, **divided), atol=1e-4)


@given(drawn=table_rows)
def test_the_advantages_of_a_task_and_agent_sum_to_zero(drawn: list) -> None:
    got = per_row("dr_mas", table_of(drawn))
    for key in {d[:2] for d in drawn}:
        assert got[[i for i, d in enumerate(drawn) if d[:2] == key]].sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_mas", "at_grpo", "rloo", "gigpo", "pass_at_k", "opo"])
@given(drawn=table_rows)
def test_a_task_knows_nothing_of_the_others(name: str, drawn: list) -> None:
    table = table_of(drawn)
    of_g = [i for i, d in enumerate(drawn) if d[0] == "g"]
    if of_g:
        np.testing.assert_allclose(per_row(name, picked(table, of_g)), per_row(name, table)[of_g], atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"opo", "reinforce_pp", "reinforce_pp_baseline"}))
@given(drawn=table_rows)
def test_lengths_change_nothing_but_where_the_formula_has_them(name: str, drawn: list) -> None:
    table = table_of(drawn)
    longer = RewardedRows(
        **{n: getattr(table, n) for n in RewardedRows.__dataclass_fields__}
        | {"token_rewards": [np.concatenate([[0.0, 0.0], r]) for r in table.token_rewards]}
    )
    np.testing.assert_allclose(per_row(name, longer), per_row(name, table), atol=1e-9)


@pytest.mark.parametrize(("name", "want"), [("rloo", [1, -1, 0.5, -0.5, 0.7]), ("grpo", [0.5, -0.5, 0.25, -0.25, 0.7])])
def test_turns_are_compared_where_the_setting_says_so(name: str, want: list[float]) -> None:
    table = rows([1.0, 0.0, 0.5, 0.0, 0.7], agents=["a", "a", "b", "b", "c"])
    got = per_row(name, table, group_by="task_agent", normalize_std=False, singleton="raw")
    np.testing.assert_allclose(got, want)
