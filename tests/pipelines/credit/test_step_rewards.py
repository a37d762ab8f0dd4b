"""Rewards of a world's steps: to the turn that acted, and to the plan that it followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.credit.rule import score_trace
from pipelines.credit.step_rewards import StepRewards
from stores.traces.conventions import UNRECORDED
from stores.types import EpisodeStatus, ToolCall, Trace, Turn

pytestmark = pytest.mark.fast


def played(make_trace: MakeTrace, events: list[str], rewards: list[float], *, is_won: bool = True) -> Trace:
    """An episode of these events: `plan`, `act`, or `step`, whose parent is the turn before it. Args: rewards: of the steps."""
    base = make_trace()
    turns: list[Turn] = []
    calls = [_event(0, 0.0, (), {"is_won": False})]
    left = iter(rewards)
    for index, kind in enumerate(events, 1):
        if kind == "step":
            calls.append(_event(index, next(left), (index - 1,), {"is_won": is_won and index == len(events)}))
        else:
            turns.append(replace(base.turns[0], turn_index=index, agent=kind, parents=(), is_format_ok=True, fields={}))
    return replace(base, turns=tuple(turns), tool_calls=tuple(calls))


def _event(index: int, reward: float, parents: tuple[int, ...], info: dict[str, Any]) -> ToolCall:
    return ToolCall(
        call_index=index,
        tool="home",
        caller="",
        parents=parents,
        request={"world": 0, "step": "a"},
        response={"text": "b", "reward": reward, "is_done": False, "info": info, "anchor": "c"},
        error="",
        start_s=0.0,
        duration_s=0.1,
    )


def paid(rule: StepRewards, trace: Trace) -> list[float]:
    return [reward.reward for reward in score_trace(rule, trace, version="v").rewards]


def test_a_step_is_paid_to_who_acted_and_to_the_plan_until_the_next_one(make_trace: MakeTrace) -> None:
    events = ["plan", "act", "step", "act", "step", "plan", "act", "step"]
    trace = played(make_trace, events, [0.0, 0.2, 0.8])
    assert paid(StepRewards("home"), trace) == pytest.approx([0.1, 0.0, 0.1, 0.4, 0.4])
    assert paid(StepRewards("home", planner_share=0.0), trace) == pytest.approx([0.0, 0.0, 0.2, 0.0, 0.8])
    assert sum(paid(StepRewards("home", planner_share=0.3), trace)) == pytest.approx(1.0), "the return"


def test_without_a_planner_the_turns_that_acted_get_all(make_trace: MakeTrace) -> None:
    assert paid(StepRewards("home"), played(make_trace, ["act", "step", "act", "step"], [0.25, 0.5])) == [0.25, 0.5]


def test_what_is_earned_before_the_first_plan_goes_to_who_acted(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["act", "step", "plan", "act", "step"], [1.0, 1.0])
    assert paid(StepRewards("home"), trace) == [1.0, 0.5, 0.5], "they add up to the return"


def test_of_two_planners_the_latest_plan_is_paid(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["plan", "critic", "act", "step", "plan", "act", "step"], [1.0, 0.5])
    assert paid(StepRewards("home"), trace) == [0.0, 0.5, 0.5, 0.25, 0.25]


def test_the_outcome_is_the_worlds_success_or_its_return(make_trace: MakeTrace) -> None:
    events = ["act", "step", "act", "step"]
    won, lost = (played(make_trace, events, [0.2, 0.3], is_won=is_won) for is_won in (True, False))
    assert [score_trace(StepRewards("home"), t, version="v").outcome for t in (won, lost)] == [1.0, 0.0]
    returns = StepRewards("home", outcome="return")
    assert score_trace(returns, won, version="v").outcome == 0.5
    high = played(make_trace, events, [2.0, 0.3])
    assert score_trace(returns, high, version="v").outcome == 1.0


def test_an_info_that_was_too_long_to_be_recorded_is_no_lost_episode(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["act", "step"], [0.5])
    last = replace(trace.tool_calls[-1], response={**trace.tool_calls[-1].response, "info": {UNRECORDED: 9000}})
    with pytest.raises(ValueError, match=r"its info of 9000 characters is not recorded, .* raise max_info"):
        StepRewards("home").assign_credit(replace(trace, tool_calls=(*trace.tool_calls[:-1], last)))


def test_a_turn_whose_format_is_invalid_is_fined(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["act", "step"], [0.5])
    fined = replace(trace, turns=(replace(trace.turns[0], is_format_ok=False),))
    assert paid(StepRewards("home", format_weight=0.2), fined) == pytest.approx([0.3])


def test_an_episode_that_was_cut_before_the_second_world_opened_is_lost_and_not_an_error(make_trace: MakeTrace) -> None:
    cut = replace(played(make_trace, ["act", "step"], [0.5]), status=EpisodeStatus.TRUNCATED)
    credit = StepRewards("kitchen").assign_credit(cut)
    assert credit.outcome == 0 and [reward.reward for reward in credit.rewards] == [0]


def test_who_writes_the_settings_of_a_world_plans_and_does_not_act(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["plan", "act", "step"], [1.0])
    begun = replace(trace.tool_calls[0], call_index=2, parents=(1,), request={"world": 0, "reset": {"level": 3}})
    act, step = (replace(trace.turns[1], turn_index=3), replace(trace.tool_calls[1], call_index=4, parents=(3,)))
    trace = replace(trace, turns=(trace.turns[0], act), tool_calls=(begun, step))
    assert paid(StepRewards("home"), trace) == [0.5, 0.5]


def test_a_name_of_no_environment_and_bad_settings_are_named(make_trace: MakeTrace) -> None:
    trace = played(make_trace, ["act", "step"], [0.5])
    with pytest.raises(ValueError, match=r"credit\.settings\.environment: .* opened no world 'house'; .*: home"):
        StepRewards("house").assign_credit(trace)
    with pytest.raises(ValueError, match=r"planner_share: 2 is not"):
        StepRewards("home", planner_share=2)
    with pytest.raises(ValueError, match=r"outcome: 'win' is not known: one of success, return"):
        StepRewards("home", outcome="win")
