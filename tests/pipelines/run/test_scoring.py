"""Figures of agents that scoring computes from the turns of its episodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipelines.run.scoring import MAX_STOP_REASONS, per_agent, solved_share, stop_reasons
from stores.types import EpisodeRewards, EpisodeStatus, Trace, TurnReward
from tests.records import MakeTrace

pytestmark = pytest.mark.fast


def test_the_share_of_cached_prompt_tokens_is_over_the_tokens_of_turns_that_an_engine_sampled(
    make_trace: MakeTrace,
) -> None:
    traces = [make_trace(0), make_trace(1), make_trace(2)]
    solver = [replace(trace.turns[0], prompt_token_ids=(1,) * 40, num_cached_tokens=32) for trace in traces]
    solver[1] = replace(solver[1], prompt_token_ids=(1,) * 60, num_cached_tokens=0)
    solver[2] = replace(solver[2], num_cached_tokens=None)
    figures = per_agent([replace(t, turns=(s, t.turns[1])) for t, s in zip(traces, solver, strict=True)], [])
    assert figures["solver"]["cached_prompt_share"] == pytest.approx(32 / 100)
    assert "cached_prompt_share" not in figures["verifier"], "nobody knows"
    assert all("reward" not in of for of in figures.values()), "nobody was paid"


def test_choices_are_counted_over_all_and_their_probabilities_where_an_option_was_offered(
    make_trace: MakeTrace,
) -> None:
    chosen = [
        ("ask", {"ask": math.log(0.75), "stop": math.log(0.25)}),
        ("stop", {"ask": math.log(0.25), "stop": math.log(0.75)}),
        ("stop", {"stop": 0.0}),
        ("stop", {"stop": 0.0}),
    ]
    traces = [
        replace(
            trace, turns=(replace(trace.turns[0], fields={"choice": name, "message": ""}, option_logprobs=logprobs),)
        )
        for trace, (name, logprobs) in zip(map(make_trace, range(4)), chosen, strict=True)
    ]
    figures = per_agent(traces, [])["solver"]
    assert (figures["chosen/ask"], figures["chosen/stop"]) == (0.25, 0.75)
    assert figures["probability/ask"] == pytest.approx(0.5)
    assert figures["probability/stop"] == pytest.approx(0.75)


def paid(trace: Trace, outcome: float, *parts: dict[str, float]) -> EpisodeRewards:
    """The rewards of the first turns of an episode, each by its parts."""
    rewards = [
        TurnReward(turn_index=turn.turn_index, agent=turn.agent, model_group="g", reward=sum(of.values()), breakdown=of)
        for turn, of in zip(trace.turns, parts, strict=False)
    ]
    about = {"episode_id": trace.episode_id, "run_id": "r", "iteration": 1, "purpose": trace.purpose}
    return EpisodeRewards(**about, credit_version="v", outcome=outcome, rewards=tuple(rewards))


def test_the_parts_of_an_agents_rewards_add_up_to_their_mean(make_trace: MakeTrace) -> None:
    traces = [make_trace(0), make_trace(1)]
    solver = traces[0].turns[0].agent
    rewards = [
        paid(traces[0], 1.0, {"correct": 1.0, "format": 0.1}),
        paid(traces[1], 0.5, {"correct": 0.0, "format": 0.1, "failed": -0.4}),
    ]
    figures = per_agent(traces, rewards)
    parts = {name: value for name, value in figures[solver].items() if name.startswith("part/")}
    assert parts == pytest.approx({"part/correct": 0.5, "part/format": 0.1, "part/failed": -0.2})
    assert figures[solver]["reward"] == pytest.approx(sum(parts.values()))
    assert figures[solver]["turns"] == sum(t.agent == solver for trace in traces for t in trace.turns) / 2
    assert not [name for name in figures["verifier"] if name.startswith("part/")], "nobody paid it"


def test_tools_are_counted_for_the_agents_whose_texts_they_read_or_who_called_them(make_trace: MakeTrace) -> None:
    """The record's tool call reads the solver's turn."""
    first, second, third = make_trace(0), make_trace(1), make_trace(2)
    (call,) = first.tool_calls
    failed = replace(call, error="away", tool="run")
    second = replace(second, tool_calls=(call, failed))
    third = replace(third, tool_calls=(replace(call, parents=(), caller="verifier"),))
    figures = per_agent([first, second, third], [])
    solver, verifier = (
        {name: value for name, value in figures[agent].items() if name.startswith("tool")}
        for agent in ("solver", "verifier")
    )
    assert solver == pytest.approx({"tool/search": 2 / 3, "tool/run": 1 / 3, "tool_error_share": 1 / 3})
    assert verifier == pytest.approx({"tool/search": 1 / 3, "tool_error_share": 0.0})


def test_an_episode_is_solved_by_an_outcome_of_one_whatever_the_mean_of_outcomes_is(make_trace: MakeTrace) -> None:
    rewards = [paid(make_trace(i), outcome) for i, outcome in enumerate((1.0, 0.9, 0.9, 0.2))]
    assert solved_share(rewards) == 0.25
    assert solved_share([]) is None


def test_reasons_to_stop_are_shares_of_all_episodes_and_rare_ones_are_one(make_trace: MakeTrace) -> None:
    names = ["passed"] * 20 + ["last_round"] * 8 + [""] + [f"odd {i}" for i in range(MAX_STOP_REASONS)]
    traces = [replace(make_trace(i), stop_reason=name, status=EpisodeStatus.OK) for i, name in enumerate(names)]
    shares = stop_reasons(traces)
    assert shares["passed"] == pytest.approx(20 / len(names)) and shares["last_round"] == pytest.approx(8 / len(names))
    assert len(shares) == MAX_STOP_REASONS + 1 and sum(shares.values()) == pytest.approx(1)
    assert shares["other"] == pytest.approx(3 / len(names)), "of eleven that ended once, eight are named"
    assert stop_reasons(traces[:29])["ok"] == pytest.approx(1 / 29), "an episode without a reason counts by its status"
