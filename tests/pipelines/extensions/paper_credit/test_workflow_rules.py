"""The rules of searches, code and debates earn the credits of UnityMAS-O (arXiv 2605.26646) and Dr. MAS (2602.08847)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from by_hand import Event, paid, trace

from pipelines.credit.math_progress import MathProgress
from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.rule import Credit, CreditRule, score_trace
from pipelines.extensions.paper_credit.code_progress import CodeProgress
from pipelines.extensions.paper_credit.debate import DebateReward
from pipelines.extensions.paper_credit.search_progress import SearchProgress
from stores.types import Cause, EpisodeStatus

pytestmark = pytest.mark.fast


def verdict(rate: float) -> Event:
    return ("verify", {"pass_rate": rate})


def answered(text: str) -> Event:
    return ("answerer", {"final_answer": text})


def searched(text: str = "q") -> list[Event]:
    return [("searcher", {"choice": "search", "search": text}), ("summarizer", {}), ("updater", {})]


END: Event = ("searcher", {"choice": "end", "search": ""})
TOWN = ("red town",)


def debated(*rounds: Sequence[str]) -> list[Event]:
    return [(f"debater_{i}", {"answer": answer}) for said in rounds for i, answer in enumerate(said)]


CODE = [
    ("planner", {}),
    ("coder", {"_bad": "no tags"}),
    verdict(0.25),
    ("reflector", {}),
    ("planner", {}),
    ("coder", {}),
    verdict(0.75),
]


def test_code_golden() -> None:
    """UnityMAS-O's own test: R_0 = .25, R_1 = .75, coder_0 in an illegal format."""
    assert paid(CodeProgress(), trace(CODE)) == {
        "planner_0": 0.25,
        "coder_0": -0.75,
        "reflector_0": 0.5,
        "planner_1": 0.5,
        "coder_1": 0.5,
    }
    assert score_trace(CodeProgress(), trace(CODE), version="v").outcome == 0.75


def test_code_three_rounds_with_a_step_back() -> None:
    round_ = [("planner", {}), ("coder", {})]
    events = [
        *round_,
        verdict(0.5),
        ("reflector", {}),
        *round_,
        verdict(0.25),
        ("reflector", {}),
        *round_,
        verdict(1.0),
    ]
    assert paid(CodeProgress(format_weight=0), trace(events)) == {
        "planner_0": 0.5,
        "coder_0": 0.5,
        "reflector_0": -0.25,
        "planner_1": -0.25,
        "coder_1": -0.25,
        "reflector_1": 0.75,
        "planner_2": 0.75,
        "coder_2": 0.75,
    }


@pytest.mark.parametrize(
    ("events", "rewards"),
    [
        (CODE[:3], {"planner_0": 0.25, "coder_0": -0.75}),
        (CODE[:4], {"planner_0": 0.25, "coder_0": -0.75, "reflector_0": 0.0}),
        (CODE[:6], {"planner_0": 0.25, "coder_0": -0.75, "reflector_0": 0.0}),
        (CODE[:2], {}),
        ([*CODE[:2], ("verify", {"error": "no answer"}), *CODE[3:6]], {}),
        ([], {}),
    ],
)
def test_code_pays_no_turn_whose_verdict_is_missing(events: list[Event], rewards: dict[str, float]) -> None:
    assert paid(CodeProgress(), trace(events)) == rewards


def test_search_golden() -> None:
    """F1 0, 2/3, 1: plan and answers absolute, the round's other turns by the change, the end 0."""
    events = [("planner", {"final_answer": "unkown"}), answered("red"), *searched(), answered("the red town"), END]
    played = trace(events, answers=TOWN, answer="the red town")
    assert paid(SearchProgress(), played) == pytest.approx(
        {
            "planner_0": 0.0,
            "answerer_0": 2 / 3,
            "searcher_0": 1 / 3,
            "summarizer_0": 1 / 3,
            "updater_0": 1 / 3,
            "answerer_1": 1.0,
            "searcher_1": 0.0,
        }
    )
    assert score_trace(SearchProgress(), played, version="v").outcome == 1.0


def test_search_a_worse_answer_costs_the_round_and_formats_cost_extra() -> None:
    bad: Event = ("summarizer", {"_bad": "no tags"})
    events = [
        ("planner", {"final_answer": "red town"}),
        answered("red town"),
        searched()[0],
        bad,
        searched()[2],
        answered("blue"),
    ]
    assert paid(SearchProgress(), trace(events, answers=TOWN, answer="blue")) == {
        "planner_0": 1.0,
        "answerer_0": 1.0,
        "searcher_0": -1.0,
        "summarizer_0": -2.0,
        "updater_0": -1.0,
        "answerer_1": 0.0,
    }


def test_search_pays_nobody_of_a_round_without_an_answer() -> None:
    events = [("planner", {"final_answer": ""}), answered(""), *searched()]
    assert paid(SearchProgress(), trace(events, answers=TOWN)) == {"planner_0": 0.0, "answerer_0": 0.0}


def test_a_search_after_a_round_that_was_passed_over_earns_what_it_changed() -> None:
    """As with `stop_on_search_end: false`: the searcher has three turns, the answerer one before them and one after each search."""
    events = [answered("blue"), END, *searched(), answered("red town"), *searched(), answered("blue")]
    assert paid(SearchProgress(), trace(events, answers=TOWN, answer="blue")) == {
        **{"answerer_0": 0.0, "answerer_1": 1.0, "answerer_2": 0.0, "searcher_0": 0.0},
        **{"searcher_1": 1.0, "summarizer_0": 1.0, "updater_0": 1.0},
        **{"searcher_2": -1.0, "summarizer_1": -1.0, "updater_1": -1.0},
    }


def test_a_debater_that_comes_later_is_scored_in_the_round_in_which_it_speaks() -> None:
    said = [("debater_0", "55"), ("debater_0", "1"), ("debater_1", "55"), ("debater_0", "55"), ("debater_1", "55")]
    played = trace([(agent, {"answer": answer}) for agent, answer in said])
    first, *others = played.turns
    for turns in (played.turns, (replace(first, round_index=7), *others)):  # whatever calls before it were given up
        rewards = score_trace(DebateReward(team="sum"), replace(played, turns=turns), version="v").rewards
        assert [reward.reward for reward in rewards] == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_unknown_settings_name_what_there_is() -> None:
    with pytest.raises(ValueError, match="'bleu' is not known: one of em, f1, math"):
        OutcomeShare(metric="bleu")
    with pytest.raises(ValueError, match="timing: 'late': one of dense"):
        DebateReward(timing="late")  # type: ignore[arg-type]


DEBATE = debated(("55", "1"), ("1", "55"), ("55", "55"))


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({}, [1, 0, 1], [0, 1, 1]),
        ({"team": "sum"}, [1, 1, 2], [1, 1, 2]),
        ({"team": "max"}, [1, 1, 1], [1, 1, 1]),
        ({"team": "mean"}, [0.5, 0.5, 1], [0.5, 0.5, 1]),
        ({"team": "dictator"}, [1, 0, 1], [1, 0, 1]),
        ({"timing": "sparse"}, [0, 0, 1], [0, 0, 1]),
        ({"timing": "accumulative"}, [2, 1, 1], [2, 2, 1]),
        ({"timing": "discounted", "gamma": 0.5}, [1.25, 0.5, 1], [0.75, 1.5, 1]),
        ({"influence": 0.2}, [1.2, 0, 1], [-0.2, 1.2, 1]),
    ],
)
def test_debate_golden(settings: dict[str, Any], first: list[float], second: list[float]) -> None:
    rewards = paid(DebateReward(**settings), trace(DEBATE, answer="55"))
    assert [rewards[f"debater_0_{t}"] for t in range(3)] == pytest.approx(first)
    assert [rewards[f"debater_1_{t}"] for t in range(3)] == pytest.approx(second)


def test_a_debate_that_ends_early_pays_what_was_said() -> None:
    played = trace([*debated(("55", "55")), ("summarizer", {})], answer="55")
    assert paid(DebateReward(timing="sparse", influence=0.2), played) == {
        "debater_0_0": 1.0,
        "debater_1_0": 1.0,
        "summarizer_0": 1.0,
    }
    cut = trace([*debated(("55", "1")), ("debater_0", {"answer": "55"})], answer="")
    assert paid(DebateReward(influence=0.2), cut) == {"debater_0_0": 1.0, "debater_1_0": 0.0, "debater_0_1": 1.0}


def test_an_episode_that_failed_earns_nothing_by_accident() -> None:
    failed = replace(trace(CODE), status=EpisodeStatus.TOOL_ERROR)
    with pytest.raises(ValueError, match="is not scored"):
        score_trace(CodeProgress(), failed, version="v")


def test_a_searcher_that_writes_nothing_legal_is_paid_its_penalty() -> None:
    events = [
        ("planner", {"final_answer": "red"}),
        ("answerer", {"final_answer": "red"}),
        ("searcher", {"choice": "", "_bad": "no tag"}),
    ]
    assert paid(SearchProgress(), trace(events, answers=["red"], answer="red")) == {
        "planner_0": 1.0,
        "answerer_0": 1.0,
        "searcher_0": -1.0,
    }


def test_a_lost_verdict_is_not_replaced_by_a_later_one() -> None:
    lost = ("verify", {"error": "no sandbox"})
    round_ = [("planner", {}), ("coder", {})]
    events = [*round_, lost, ("reflector", {}), *round_, verdict(0.75), ("reflector", {}), *round_, verdict(1.0)]
    assert paid(CodeProgress(), trace(events)) == {
        "reflector_1": 0.25,
        "planner_2": 0.25,
        "coder_2": 0.25,
    }


@pytest.mark.parametrize(
    ("rule", "events", "bad"),
    [
        (CodeProgress(format_weight=0.25), [("planner", {}), ("coder", {"_bad": "x"}), verdict(0.5)], 1),
        (SearchProgress(format_weight=0.25), [("planner", {"final_answer": "55", "_bad": "x"})], 0),
        (SearchProgress(format_weight=0.25), [("searcher", {"choice": "end", "_bad": "x"})], 0),
        (DebateReward(format_weight=0.25), [("debater_0", {"answer": "55", "_bad": "x"})], 0),
        (OutcomeShare(format_weight=0.25), [("solver", {"_bad": "x"})], 0),
        (MathProgress(format_weight=0.25), [("solver", {"answer": "55", "_bad": "x"})], 0),
    ],
)
def test_the_penalty_of_a_format_is_the_part_that_other_rules_look_for(
    rule: CreditRule, events: list[Event], bad: int
) -> None:
    breakdown = rule.assign_credit(trace(events, answer="55")).rewards[bad].breakdown
    assert breakdown["format"] == -0.25
    assert set(breakdown) <= {"format", "progress", "f1", "end", "debate", "influence", "outcome"}


@pytest.mark.parametrize(
    ("events", "rewards"),
    [
        ([("coder", {"_bad": "x"})], {"coder_0": -0.25}),
        (
            [("coder", {}), verdict(0.75), ("reflector", {}), ("planner", {}), ("coder", {"_bad": "x"})],
            {"coder_0": 0.75, "reflector_0": -0.75, "planner_0": -0.75, "coder_1": -1.0},
        ),
        ([("coder", {}), verdict(0.75), ("reflector", {})], {"coder_0": 0.75, "reflector_0": -0.75}),
        (
            [("coder", {}), verdict(0.75), ("coder", {}), ("verify", {"error": "refused"})],
            {"coder_0": 0.75, "coder_1": -0.75},
        ),
    ],
)
def test_code_that_fails_costs_what_code_costs_that_passes_nothing(
    events: list[Event], rewards: dict[str, float]
) -> None:
    failed = replace(trace(events), status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    rule = CodeProgress(format_weight=0.25)
    assert paid(rule, failed) == rewards
    assert score_trace(rule, failed, version="v").outcome == 0.0


def test_code_that_was_never_verified_is_worth_nothing() -> None:
    for said in ({"error": "timed out"}, "no verdict", {"passed": 3}):
        call = replace(trace([verdict(0.5)]).tool_calls[0], response=said if isinstance(said, str) else dict(said))
        call = replace(call, error=said["error"]) if isinstance(said, dict) and "error" in said else call
        episode = replace(trace([("planner", {}), ("coder", {})]), tool_calls=(call,))
        assert CodeProgress().assign_credit(episode) == Credit(outcome=0.0, rewards=())
    assert CodeProgress().assign_credit(trace([("coder", {})])) == Credit(outcome=0.0, rewards=())


def test_a_verdict_after_the_agents_next_turn_says_nothing_about_this_one() -> None:
    events = [("coder", {}), ("coder", {}), verdict(0.5), ("critic", {}), ("coder", {}), verdict(0.75)]
    assert paid(CodeProgress(), trace(events)) == {"coder_1": 0.5, "coder_2": 0.25}, "the critic has no part in it"
