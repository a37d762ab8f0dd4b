"""A team against one agent: budgets, ways of using many answers, and who may be called the winner."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.statistics import Interval, Resampling
from pipelines.extensions.compare.against_one import (
    AloneScore,
    Answer,
    Way,
    alone_score,
    answers_by_task,
    in_words,
    outcome_by,
    winner_of,
    within_budget,
)
from stores.types import EpisodeRewards
from tests.records import build_trace

pytestmark = pytest.mark.fast


def answer(text: str, outcome: float = 0.0, *, tokens: int = 10, logprob: float = -1.0) -> Answer:
    return Answer(text=text, outcome=outcome, num_tokens=tokens, logprob=logprob)


MIXED = [
    answer("4", logprob=-0.5),
    answer("5", 1.0, logprob=-2.0),
    answer("5", 1.0, logprob=-3.0),
    answer("", logprob=-0.1),
]


@pytest.mark.parametrize(("way", "outcome"), [("majority", 1.0), ("likeliest", 0.0), ("any", 1.0), ("longer", 1.0)])
def test_each_way_uses_the_same_answers_differently(way: Way, outcome: float) -> None:
    assert outcome_by(way, MIXED) == outcome


def test_the_first_of_several_most_frequent_answers_counts_and_empty_ones_have_no_vote() -> None:
    assert outcome_by("majority", [answer("4"), answer("5", 1.0)]) == 0.0
    assert outcome_by("majority", [answer("5", 1.0), answer("4")]) == 1.0
    assert outcome_by("majority", [answer(""), answer(""), answer("5", 1.0)]) == 1.0
    assert outcome_by("majority", [answer("", 0.25)]) == 0.25, "who never answers gets what that is worth"
    assert outcome_by("any", [answer("4"), answer("3")]) == 0.0


@given(
    tokens=st.lists(st.lists(st.integers(1, 30), min_size=12, max_size=12), min_size=1, max_size=30),
    budget=st.floats(1, 100, allow_nan=False),
)
def test_answers_take_the_budget_on_average(tokens: list[list[int]], budget: float) -> None:
    answers = {f"t{i:02}": [answer("x", tokens=n) for n in of_task] for i, of_task in enumerate(tokens)}
    used = within_budget(answers, budget)
    assert used.keys() == answers.keys() and all(used.values()), "one answer at least"
    for task, own in used.items():
        assert own == answers[task][: len(own)]
    has_enough = all(sum(of_task) > budget + 30 for of_task in tokens)
    is_large = budget >= 30  # one answer always fits
    if has_enough and is_large:
        spent = sum(a.num_tokens for own in used.values() for a in own)
        assert abs(spent - budget * len(used)) <= 15, "but for half an answer"


def test_what_a_task_leaves_is_the_next_ones() -> None:
    used = within_budget({"a": [answer("x", tokens=30)] * 3, "b": [answer("x", tokens=30)] * 3}, 40)
    assert {task: len(own) for task, own in used.items()} == {"a": 1, "b": 2}
    assert [
        len(own)
        for own in within_budget({"a": [answer("x", tokens=90)] * 2, "b": [answer("x", tokens=9)] * 2}, 10).values()
    ] == [1, 1]


def test_answers_come_from_episodes_in_the_order_in_which_they_were_sampled() -> None:
    base = build_trace(0)
    traces = [
        replace(base, episode_id=f"e{i}", episode_index=i, answer=text) for i, text in ((2, "c"), (0, "a"), (1, ""))
    ]
    rewards = [
        EpisodeRewards(
            episode_id=t.episode_id,
            run_id="run",
            iteration=0,
            purpose=base.purpose,
            credit_version="c",
            outcome=float(t.episode_index),
            rewards=(),
        )
        for t in traces
    ]
    (answers,) = answers_by_task(traces, rewards).values()
    assert [(a.text, a.outcome) for a in answers] == [("a", 0.0), ("", 1.0), ("c", 2.0)]
    logprobs = [logprob for turn in base.turns for logprob in turn.rollout_logprobs]
    assert answers[0].logprob == pytest.approx(sum(logprobs) / len(logprobs))
    assert answers[0].num_tokens == len(logprobs)


def score(way: Way, low: float, high: float, *, accuracy: float = 0.5, tokens: float = 50.0) -> AloneScore:
    return AloneScore(
        way=way,
        is_trained=True,
        accuracy=accuracy,
        ci95=(accuracy - 0.1, accuracy + 0.1),
        num_tokens=tokens,
        num_answers=2.0,
        team_minus_alone=Interval(mean=(low + high) / 2, low=low, high=high, num_tasks=100),
    )


@pytest.mark.parametrize(
    ("gains", "winner", "sentence"),
    [
        ({"majority": (0.02, 0.1), "likeliest": (0.1, 0.2), "any": (-0.3, -0.1)}, "team", "The team wins: solver"),
        ({"majority": (-0.1, -0.02), "likeliest": (0.1, 0.2)}, "alone", "The single agent wins: solver"),
        ({"majority": (-0.02, 0.1), "likeliest": (0.1, 0.2)}, "", "No difference can be shown: solver"),
    ],
)
def test_the_team_wins_if_it_beats_every_way_and_the_agent_if_one_way_beats_the_team(
    gains: dict[Way, tuple[float, float]], winner: str, sentence: str
) -> None:
    scores = [score(way, *edges) for way, edges in gains.items()]
    assert winner_of(scores) == winner
    assert in_words(scores, agent="solver", team_accuracy=0.6, team_tokens=50).startswith(sentence)


def test_a_perfect_judge_decides_nothing() -> None:
    assert winner_of([score("any", -0.5, -0.1)]) == ""


def test_the_sentence_is_about_the_best_way_or_the_one_that_wins() -> None:
    scores = [score("majority", -0.02, 0.05, accuracy=0.6), score("likeliest", 0.1, 0.2, accuracy=0.4)]
    assert "0.600 (majority, 2.0 answers and 50 tokens per task), the team 0.620 with 48 tokens" in in_words(
        scores, agent="solver", team_accuracy=0.62, team_tokens=48
    )
    scores = [score("longer", -0.3, -0.1, accuracy=0.7), score("majority", -0.2, 0.02, accuracy=0.8)]
    assert "(longer," in in_words(scores, agent="solver", team_accuracy=0.6, team_tokens=48)


def test_planted_differences_are_found_and_equal_ones_are_not() -> None:
    rng = random.Random(0)
    how = Resampling(num_samples=2000, confidence=0.975)
    wins = {"team": 0, "alone": 0, "": 0}
    for better in ("team", "alone", ""):
        chance = {"team": 0.75, "alone": 0.45, "": 0.6}[better]
        for _ in range(20):
            team = {f"t{i}": [float(rng.random() < chance)] for i in range(256)}
            answers = {task: [answer("x", float(rng.random() < 0.6))] for task in team}
            scores = [alone_score(way, answers, team, how, is_trained=True) for way in ("majority", "likeliest")]
            wins[better] += winner_of(scores) == better
    assert wins["team"] >= 17 and wins["alone"] >= 17 and wins[""] >= 17


def test_tasks_that_only_one_side_played_are_left_out() -> None:
    found = alone_score(
        "majority",
        {"a": [answer("x", 1.0)], "b": [answer("x", 1.0)]},
        {"a": [0.0, 1.0], "c": [1.0]},
        Resampling(families={}, seed=0, num_samples=200, confidence=0.95),
        is_trained=False,
    )
    assert (found.accuracy, found.num_answers, found.team_minus_alone.mean) == (1.0, 1.0, -0.5)
    with pytest.raises(ValueError, match="no task in common"):
        alone_score(
            "any",
            {"a": MIXED},
            {"c": [1.0]},
            Resampling(families={}, seed=0, num_samples=200, confidence=0.95),
            is_trained=False,
        )
