"""The counting house: tasks with exact answers in disjoint splits, and three ways to pay the same episode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from records import MakeTrace, make_trace  # noqa: F401  # a fixture

from stores.types import Trace
from tests.algorithms.counting_house.credit import CountingHouseCredit
from tests.algorithms.counting_house.tasks import generate, split_of

pytestmark = pytest.mark.fast


def episode(make: MakeTrace, said: list[tuple[str, dict[str, str]]], *, prompt: str, answer: str, right: str) -> Trace:
    """An episode of these turns: (agent, fields)."""
    trace = make(0)
    turns = tuple(
        replace(trace.turns[0], turn_index=i, agent=agent, model_group="house", fields=fields)
        for i, (agent, fields) in enumerate(said)
    )
    return replace(trace, task=replace(trace.task, prompt=prompt, answers=(right,)), turns=turns, answer=answer)


def pays(trace: Trace, pay: str) -> list[float]:
    return [reward.reward for reward in CountingHouseCredit(pay).assign_credit(trace).rewards]


CALLS: list[tuple[str, dict[str, str]]] = [
    ("teller", {"count": "3"}),  # right
    ("teller", {"count": ""}),  # nobody can read it: asked again
    ("teller", {"count": "6"}),  # 2+4: the bad ones counted too
    ("clerk", {"remark": "rain"}),
    ("auditor", {"verdict": "keep"}),
]


def test_every_turn_is_paid_by_outcome_by_own_deed_or_by_what_it_changed(make_trace: Any) -> None:  # noqa: F811
    lost = episode(make_trace, CALLS, prompt="3+1 2+4", answer="9", right="5")
    assert CountingHouseCredit().assign_credit(lost).outcome == 0.0
    assert pays(lost, "outcome") == [0, 0, 0, 0, 0]
    assert pays(lost, "own") == [1, 0, 0, 0, 1]
    assert pays(lost, "progress") == [0, 0, -1, 0, 0]


def test_an_auditor_that_burns_a_right_total_pays_for_it_alone(make_trace: Any) -> None:  # noqa: F811
    calls = [("teller", {"count": "3"}), ("teller", {"count": "2"}), ("clerk", {}), ("auditor", {"verdict": "burn"})]
    burnt = episode(make_trace, calls, prompt="3+1 2+4", answer="", right="5")
    assert pays(burnt, "own") == [1, 1, 0, 0]
    assert pays(burnt, "progress") == [0, 0, 0, -1]
    kept = episode(make_trace, [*calls[:3], ("auditor", {"verdict": "keep"})], prompt="3+1 2+4", answer="5", right="5")
    assert pays(kept, "outcome") == [1, 1, 1, 1]
    assert pays(kept, "progress") == [0, 0, 0, 0]


def test_a_count_that_nobody_could_read_twice_is_wrong(make_trace: Any) -> None:  # noqa: F811
    calls = [("teller", {"count": ""}), ("teller", {"count": ""}), ("teller", {"count": "2"}), ("clerk", {})]
    trace = episode(make_trace, [*calls, ("auditor", {"verdict": "keep"})], prompt="3+1 2+4", answer="", right="5")
    assert pays(trace, "own") == [0, 0, 1, 0, 1]
    assert pays(trace, "progress") == [0, -1, 0, 0, 0]


def test_progress_adds_up_to_the_outcome_less_one(make_trace: Any) -> None:  # noqa: F811
    lucky = [("teller", {"count": "4"}), ("teller", {"count": "1"}), ("clerk", {}), ("auditor", {"verdict": "keep"})]
    trace = episode(make_trace, lucky, prompt="3+1 2+4", answer="5", right="5")
    assert sum(pays(trace, "progress")) == 0.0, "two mistakes that cancel out"
    assert pays(trace, "progress") == [-1, 0, 0, 1]


def test_tasks_count_the_good_coins_and_splits_share_none() -> None:
    tasks = {split: generate(seed=3, split=split, count=120) for split in ("train", "gate", "test")}
    for split, found in tasks.items():
        assert len({task.task_id for task in found}) == 120
        for task in found:
            piles = [(int(p[0]), int(p[2])) for p in task.prompt.split()]
            assert 2 <= len(piles) <= 5
            assert task.answers == (str(sum(good for good, _ in piles)),)
            assert split_of(piles) == split_of(piles[::-1]) == split
    assert generate(seed=3, split="test", count=120) == tasks["test"]
    assert generate(seed=4, split="test", count=120) != tasks["test"]
