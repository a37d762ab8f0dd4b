"""rows: what becomes a training row, what is refused, what the funnel shows."""

from dataclasses import replace
from typing import Any

import pytest
from records import build_rewards, build_trace, build_turn

from stores.types import (
    SERVED,
    Cause,
    EpisodeRewards,
    EpisodeStatus,
    Sampling,
    Task,
    ToolCall,
    Trace,
    Turn,
    TurnReward,
)
from train_loops.rows.samples import Funnel, Sample, samples_of, trajectories_of

pytestmark = pytest.mark.fast


def turn(turn_index: int, agent: str, *, model_group: str = "math", completion: tuple[int, ...] = (7, 8)) -> Turn:
    return build_turn(
        turn_index,
        agent,
        model_group,
        prompt_token_ids=(1, 2, 3),
        completion_token_ids=completion,
        rollout_logprobs=tuple(-0.5 for _ in completion),
        sampling=Sampling(max_tokens=8, temperature=0.7),
    )


def trace(*turns: Turn, **changes: Any) -> Trace:
    task = Task(task_id="t1", prompt="p", answers=("1",))
    ids = {"episode_id": "e1", "group_id": "g1"}
    return build_trace(**ids, task=task, turns=turns, tool_calls=(), outcome_metadata={}, **changes)


def rewards(*turn_rewards: tuple[int, str, float]) -> EpisodeRewards:
    paid = [
        TurnReward(turn_index=i, agent=agent, model_group="math", reward=r, breakdown={})
        for i, agent, r in turn_rewards
    ]
    return replace(build_rewards(trace()), rewards=tuple(paid))


def rows(t: Trace, r: EpisodeRewards | None, **changed: object) -> list:
    return samples_of(t, r, **{"model_group": "math", **changed})


def test_a_turn_of_the_model_group_becomes_one_row_with_its_own_reward_and_temperature() -> None:
    got = rows(
        trace(turn(2, "verifier", completion=(9,)), turn(0, "solver"), turn(1, "judge", model_group="other")),
        replace(rewards((0, "solver", 1.0), (2, "verifier", 0.25)), outcome=0.0),
    )
    assert [(s.agent, s.reward, s.turn_index) for s in got] == [("solver", 1.0, 0), ("verifier", 0.25, 2)]
    assert got[0].token_ids == [1, 2, 3, 7, 8]
    assert (got[0].prompt_length, got[0].completion_length) == (3, 2)
    assert (got[0].group_id, got[0].task_id, got[0].temperature, got[0].max_tokens) == ("g1", "t1", 0.7, 8)
    assert got[0].baseline is None


def test_a_row_knows_the_round_of_the_episode_that_other_model_groups_make_too() -> None:
    turns = [turn(0, "solver"), turn(1, "judge", model_group="other"), turn(2, "judge", model_group="other")]
    got = rows(trace(*turns, turn(3, "writer")), rewards((0, "solver", 1.0), (3, "writer", 1.0)))
    assert [(s.agent, s.round_index, s.episode_round) for s in got] == [("solver", 0, 0), ("writer", 0, 1)]


@pytest.mark.parametrize("status", [EpisodeStatus.TIMEOUT, EpisodeStatus.INFRA_ERROR, EpisodeStatus.TOOL_ERROR])
def test_a_failed_episode_gives_rows_only_where_the_policy_caused_it(status: EpisodeStatus) -> None:
    t = trace(turn(0, "solver"), status=status)
    for cause, num_rows in ((Cause.NONE, 0), (Cause.INFRASTRUCTURE, 0), (Cause.AUTHOR, 0), (Cause.POLICY, 1)):
        assert len(rows(replace(t, cause=cause), rewards((0, "solver", 0.0)))) == num_rows, cause


def test_an_episode_of_mixed_versions_is_left_out_unless_configured() -> None:
    t = trace(turn(0, "solver"), is_version_mixed=True)
    assert rows(t, rewards((0, "solver", 1.0))) == []
    assert len(rows(t, rewards((0, "solver", 1.0)), train_mixed_versions=True)) == 1
    t = trace(replace(turn(0, "solver"), is_version_mixed=True))
    assert rows(t, rewards((0, "solver", 1.0))) == []


def test_a_variant_of_an_episode_is_neither_trained_on_nor_counted() -> None:
    t = replace(trace(turn(0, "solver")), variant="greedy")
    assert rows(t, rewards((0, "solver", 1.0))) == []
    funnel = Funnel(model_group="math")
    funnel.see(t, rewards((0, "solver", 1.0)))
    assert funnel.counts == {}


def test_of_a_variant_the_turns_that_are_named_train_and_are_counted() -> None:
    t = replace(trace(turn(0, "solver"), turn(1, "verifier"), turn(2, "solver")), variant="counterfactual-1")
    credit = rewards((0, "solver", 1.0), (1, "verifier", 0.5), (2, "solver", 1.0))
    assert [(s.agent, s.reward, s.is_sibling) for s in rows(t, credit, sibling_turns={1})] == [("verifier", 0.5, True)]
    assert [s.is_sibling for s in rows(replace(t, variant=""), credit)] == [False] * 3
    funnel = Funnel(model_group="math")
    funnel.see(t, credit, sibling_turns={1})
    funnel.see(t, None, sibling_turns={1})
    assert {a: list(c.values()) for a, c in funnel.counts.items()} == {"verifier": [2, 2, 2, 2, 1, 0, 0]}


def test_a_turn_without_reward_is_left_out_rather_than_rewarded_with_zero() -> None:
    t = trace(turn(0, "solver"), turn(1, "verifier"))
    assert [s.agent for s in rows(t, rewards((1, "verifier", 0.0)))] == ["verifier"]
    assert rows(t, None) == []


@pytest.mark.parametrize(
    ("broken", "credit", "message"),
    [
        ({"rollout_logprobs": (-0.5,)}, (0, "solver", 1.0), "2 completion tokens but 1 logprobs"),
        ({"rollout_logprobs": (-0.5, float("nan"))}, (0, "solver", 1.0), "not finite"),
        ({"prompt_token_ids": ()}, (0, "solver", 1.0), "no prompt tokens"),
        ({"sampling": Sampling(max_tokens=8, top_p=0.9)}, (0, "solver", 1.0), "top_p=0.9.*training needs top_p=1"),
        ({"sampling": Sampling(max_tokens=8, temperature=0.0)}, (0, "solver", 1.0), "temperature>0"),
        ({}, (5, "solver", 1.0), "reward for turn 5, but the turns are"),
        ({}, (0, "verifier", 1.0), "names agent 'verifier'"),
        ({}, (0, "solver", float("inf")), "must be finite"),
    ],
)
def test_a_broken_row_is_an_error_that_names_episode_and_fault(broken: dict, credit: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=rf"episode e1.*{message}"):
        rows(trace(replace(turn(0, "solver"), **broken)), rewards(credit))


def test_rewards_of_another_episode_or_twice_for_one_turn_are_refused() -> None:
    with pytest.raises(ValueError, match="belong to episode e2"):
        rows(trace(turn(0, "solver")), replace(rewards((0, "solver", 1.0)), episode_id="e2"))
    with pytest.raises(ValueError, match="rewarded twice"):
        rows(trace(turn(0, "solver")), rewards((0, "solver", 1.0), (0, "solver", 1.0)))


def test_trajectories_are_single_rows_for_returns_and_episodes_in_time_order_for_increments() -> None:
    credit = rewards((0, "solver", 1.0), (1, "verifier", 1.0))
    one = rows(trace(turn(0, "solver"), turn(1, "verifier")), credit)
    other = [replace(s, episode_id="e2") for s in one]
    mixed = [one[1], other[0], one[0], other[1]]
    assert trajectories_of(mixed, credit_kind="returns") == [[0], [1], [2], [3]]
    assert sorted(trajectories_of(mixed, credit_kind="increments")) == [[1, 3], [2, 0]]
    with pytest.raises(ValueError, match="'outcome'"):
        trajectories_of(mixed, credit_kind="outcome")  # type: ignore[arg-type]


def test_the_funnel_counts_where_each_agents_turns_fell_out() -> None:
    funnel = Funnel(model_group="math")
    funnel.see(
        trace(turn(0, "solver"), turn(1, "verifier"), turn(2, "x", model_group="y")), rewards((0, "solver", 1.0))
    )
    repeated = replace(turn(0, "solver", completion=()), num_attempts=3)
    funnel.see(trace(repeated), rewards((0, "solver", 1.0)))
    funnel.see(trace(turn(0, "solver"), status=EpisodeStatus.TIMEOUT), None)
    funnel.add("trained", ["solver"])
    assert {a: list(c.values()) for a, c in funnel.counts.items()} == {
        "solver": [5, 3, 2, 1, 1, 0, 1],
        "verifier": [1, 1, 1, 1, 0, 0, 0],
    }


def test_a_row_says_all_that_its_trace_its_turn_and_its_rewards_say() -> None:
    state = ToolCall(
        call_index=1,
        tool="home",
        caller="",
        parents=(),
        request={"world": 0, "step": "look"},
        response={"text": "A drawer.", "anchor": "in the kitchen"},
        error="",
        start_s=0.0,
        duration_s=0.0,
    )
    sampling = Sampling(max_tokens=8, temperature=0.7, constraint='{"choice": ["7 8"]}')
    acted = replace(turn(2, "solver"), round_index=1, rollout_logprobs=(-0.5, -0.25), sampling=sampling)
    served = {SERVED: {"team": "t", "is_trainable": True}}
    t = replace(
        trace(turn(0, "solver"), acted, status=EpisodeStatus.TIMEOUT),
        cause=Cause.POLICY,
        tool_calls=(state,),
        outcome_metadata=served,
    )
    credit = replace(rewards((2, "solver", 0.25)), outcome=0.5)
    row = Sample(
        episode_id="e1",
        group_id="g1",
        task_id="t1",
        agent="solver",
        turn_index=2,
        round_index=1,
        episode_round=1,
        token_ids=[1, 2, 3, 7, 8],
        prompt_length=3,
        rollout_logprobs=[-0.5, -0.25],
        reward=0.25,
        temperature=0.7,
        max_tokens=8,
        constraint='{"choice": ["7 8"]}',
        masks=None,
        status=EpisodeStatus.TIMEOUT,
        is_served=True,
        outcome=0.5,
        baseline=None,
        anchor="in the kitchen",
        is_sibling=False,
    )
    assert rows(t, credit) == [row]
    assert rows(replace(t, outcome_metadata={}, tool_calls=()), credit) == [replace(row, is_served=False, anchor="")]


def test_the_funnel_counts_a_turn_of_one_token_and_mixed_versions_where_they_train() -> None:
    t = trace(turn(0, "solver", completion=(7,)), is_version_mixed=True)
    for train_mixed_versions, num_ok in ((False, 0), (True, 1)):
        funnel = Funnel(model_group="math", train_mixed_versions=train_mixed_versions)
        funnel.see(t, rewards((0, "solver", 1.0)))
        assert list(funnel.counts["solver"].values()) == [1, 1, 1, num_ok, num_ok, 0, 0]
