"""Costs: what a turn costs, which turns are on the critical path, and how the multiplier finds its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.sections import CostConfig
from pipelines.credit.cost import Costs, charge, mean_cost, next_multiplier, turn_costs
from stores.types import Cause, EpisodeRewards, ToolCall, Trace
from tests.records import build_trace
from train_loops.signal.baselines import baselines_of

pytestmark = pytest.mark.fast

Span = tuple[float, float, int]
"""(start, seconds, completion tokens) of a turn."""


def episode(turns: list[Span], calls: Sequence[tuple[int, float, float]] = (), number: int = 0) -> Trace:
    """An episode of turns with these times, events numbered in order; `calls` are (index, start, seconds) of a tool."""
    base = build_trace(number)
    free = [i for i in range(len(turns) + len(calls)) if i not in {index for index, _, _ in calls}]
    made = tuple(
        replace(
            base.turns[0],
            turn_index=index,
            completion_token_ids=(1,) * length,
            rollout_logprobs=(-1.0,) * length,
            start_s=start,
            duration_s=seconds,
        )
        for index, (start, seconds, length) in zip(free, turns, strict=True)
    )
    used = tuple(
        ToolCall(
            call_index=index,
            tool="t",
            caller="",
            parents=(),
            request={},
            response="",
            error="",
            start_s=start,
            duration_s=seconds,
        )
        for index, start, seconds in calls
    )
    return replace(base, turns=made, tool_calls=used)


SIDE_BY_SIDE = episode([(0.0, 1.0, 5), (1.0, 2.0, 30), (1.0, 4.0, 10), (5.0, 1.0, 7)])
"""A turn, two side by side, and one after both."""


def costs(trace: Trace, figure: str, **prices: float) -> Costs:
    return turn_costs(trace, CostConfig(figure=figure, at_most=1, prices=prices))


def test_tokens_and_calls_are_counted_with_the_turn_that_they_follow() -> None:
    trace = episode([(0.1, 1.0, 5), (3.0, 1.0, 7)], calls=[(0, 0.0, 0.1), (2, 1.1, 1.0), (3, 2.1, 0.5)])
    assert costs(trace, "completion_tokens") == {1: 5.0, 4: 7.0}
    assert costs(trace, "calls") == {1: 3.0, 4: 1.0}, "a call before all turns is nobody's"
    assert costs(trace, "seconds") == {1: pytest.approx(2.5), 4: pytest.approx(1.0)}


def test_of_turns_side_by_side_the_heavier_one_is_on_the_path() -> None:
    assert costs(SIDE_BY_SIDE, "completion_tokens") == {0: 5.0, 1: 30.0, 2: 10.0, 3: 7.0}
    assert costs(SIDE_BY_SIDE, "critical_path_tokens") == {0: 5.0, 1: 30.0, 2: 0.0, 3: 7.0}
    assert costs(SIDE_BY_SIDE, "seconds") == {0: 1.0, 1: 0.0, 2: 4.0, 3: 1.0}


def test_each_model_group_has_its_price_and_tools_cost_one() -> None:
    one = episode([(0.0, 1.0, 5), (2.0, 1.0, 7)], calls=[(1, 1.0, 1.0)])
    strong = replace(one.turns[1], model_group="strong")
    trace = replace(one, turns=(one.turns[0], strong))
    assert costs(trace, "completion_tokens", strong=4.0) == {0: 5.0, 2: 28.0}
    assert costs(trace, "calls", strong=4.0) == {0: 2.0, 2: 4.0}
    assert costs(trace, "critical_path_tokens", strong=4.0) == {0: 5.0, 2: 28.0}
    assert costs(trace, "seconds", strong=4.0) == {0: 2.0, 2: 4.0}
    with pytest.raises(ValueError, match=r"strong: -1\.0 is no price"):
        CostConfig(at_most=1, prices={"strong": -1.0})


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 12).map(float), st.integers(1, 4).map(float), st.integers(0, 9)),
        min_size=1,
        max_size=7,
    )
)
def test_the_critical_path_is_the_heaviest_sequence_of_turns_that_do_not_overlap(turns: list[Span]) -> None:
    found = costs(episode(turns), "critical_path_tokens")

    def heaviest(free_from: float) -> float:
        ahead = [(start + seconds, weight) for start, seconds, weight in turns if start >= free_from]
        return max((weight + heaviest(end) for end, weight in ahead), default=0.0)

    assert sum(found.values()) == heaviest(0.0)
    kept = sorted((turns[i][0], turns[i][0] + turns[i][1]) for i, cost in found.items() if cost)
    assert all(one[1] <= other[0] for one, other in pairwise(kept))


def test_an_episode_without_turns_costs_nothing() -> None:
    empty = replace(SIDE_BY_SIDE, turns=())
    for figure in ("completion_tokens", "calls", "critical_path_tokens", "seconds"):
        assert costs(empty, figure) == {}
    assert mean_cost([empty], CostConfig(at_most=1)) == 0.0


def test_a_turn_pays_for_itself_and_all_that_follows(make_rewards: Callable[..., EpisodeRewards]) -> None:
    before = make_rewards(SIDE_BY_SIDE)
    (after,) = charge([before], [SIDE_BY_SIDE], CostConfig(at_most=13), multiplier=0.5, mean=500.0)
    assert [part.breakdown["cost"] for part in after.rewards] == pytest.approx([-52 / 26, -47 / 26, -17 / 26, -7 / 26])
    assert all(part.reward == pytest.approx(sum(part.breakdown.values())) for part in after.rewards)
    assert after.outcome == 1.0, "the outcome stays"


def test_an_episode_that_the_policy_failed_pays_what_others_cost_and_makes_none_cheaper(
    make_rewards: Callable[..., EpisodeRewards],
) -> None:
    failed = replace(episode([(0.0, 1.0, 5), (1.0, 1.0, 3)]), cause=Cause.POLICY)
    config = CostConfig(at_most=13)
    (after,) = charge([make_rewards(failed)], [failed], config, multiplier=0.5, mean=52.0)
    assert [part.breakdown["cost"] for part in after.rewards] == [-2.0, -2.0]
    assert mean_cost([SIDE_BY_SIDE, failed], config) == 52.0
    assert mean_cost([failed], config) is None, "nobody knows: the multiplier stays"


def test_failing_pays_no_more_than_a_wrong_answer_that_cost_more_than_the_mean(
    make_rewards: Callable[..., EpisodeRewards],
) -> None:
    long, short = episode([(0.0, 1.0, 40)]), episode([(0.0, 1.0, 4)], number=1)
    failed = replace(episode([(0.0, 1.0, 4)], number=2), cause=Cause.POLICY, group_id=long.group_id)
    traces, config = [long, short, failed], CostConfig(at_most=10)
    rewards = [make_rewards(trace, outcome=0.1) for trace in traces]  # less a tenth: 0
    charged = charge(rewards, traces, config, multiplier=1.0, mean=22.0)
    assert [one.rewards[0].reward for one in charged] == pytest.approx([-4.0, -0.4, -4.0])
    assert all(part.reward == pytest.approx(sum(part.breakdown.values())) for one in charged for part in one.rewards)
    own = charge(rewards, traces, config, multiplier=1.0, mean=22.0, caps_failed=False)
    assert own[2].rewards[0].reward == pytest.approx(-2.2), "the rule itself says what a failure earns"


def test_the_multiplier_grows_above_the_limit_shrinks_below_it_and_is_never_negative() -> None:
    config = CostConfig(at_most=100, rate=0.1)
    assert next_multiplier(0.0, 200.0, config) == pytest.approx(0.1)
    assert next_multiplier(0.3, 50.0, config) == pytest.approx(0.25)
    assert next_multiplier(0.02, 0.0, config) == 0.0
    assert next_multiplier(0.3, 100.0, config) == pytest.approx(0.3)


def test_the_multiplier_settles_where_the_limit_is_met() -> None:
    config = CostConfig(at_most=100, rate=0.2)
    multiplier, costs = 0.0, []
    for _ in range(200):  # a policy that spends less the more it is charged
        costs.append(200 / (1 + 2 * multiplier))
        multiplier = next_multiplier(multiplier, costs[-1], config)
    assert costs[-1] == pytest.approx(100, abs=1) and multiplier == pytest.approx(0.5, abs=0.01)


def test_the_mean_is_over_episodes() -> None:
    config = CostConfig(figure="calls", at_most=2)
    assert mean_cost([SIDE_BY_SIDE, episode([(0.0, 1.0, 3)])], config) == 2.5


def test_a_turn_is_held_against_the_charged_replay_in_its_place(make_rewards: Callable[..., EpisodeRewards]) -> None:
    played = episode([(0.0, 1.0, 10), (1.0, 1.0, 30)])
    again = replace(played, episode_id="again", variant="counterfactual-0", turns=played.turns[:1])
    rewards = [make_rewards(played, outcome=1.1), make_rewards(again, outcome=1.1)]
    config = CostConfig(figure="completion_tokens", at_most=40)
    charged = {r.episode_id: r for r in charge(rewards, [played, again], config, multiplier=1.0, mean=40.0)}
    assert [part.reward for part in charged[played.episode_id].rewards] == pytest.approx([0.0, 0.25])
    against = baselines_of([played, again], charged, credit_kind="returns")
    assert against[played.episode_id, 0] == pytest.approx(0.75), "the replay ended after 10 tokens"
