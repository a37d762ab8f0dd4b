"""The seeded generator of arithmetic tasks."""

from __future__ import annotations

import pytest

from pipelines.examples.arithmetic.tasks import SHARES, generate, split_of

pytestmark = pytest.mark.fast


def test_splits_never_overlap_whatever_the_seed() -> None:
    taken = {
        split: {t.task_id for seed in (0, 7) for t in generate(seed=seed, split=split, count=150)} for split in SHARES
    }
    assert len(set.union(*taken.values())) == sum(len(ids) for ids in taken.values())


def test_factors_in_either_order_are_in_one_split() -> None:
    assert all(split_of(a, b, c) == split_of(a, c, b) for a in range(1, 50) for b in range(1, 10) for c in range(1, b))


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first = generate(seed=1, split="test", count=50)
    assert first == generate(seed=1, split="test", count=50)
    assert first != generate(seed=2, split="test", count=50)
    assert len({t.task_id for t in first}) == 50


def test_prompts_state_the_problem_and_answers_solve_it() -> None:
    for task in generate(seed=3, split="train", count=20, template="Compute {a} + {b} * {c}."):
        assert task.answers == (str(eval(task.prompt.removeprefix("Compute ").removesuffix("."))),)


def test_more_tasks_than_the_split_holds_is_refused_with_the_number_it_holds() -> None:
    held = sum(split_of(a, b, c) == "gate" for a in range(1, 50) for b in range(1, 10) for c in range(1, 10))
    assert held >= 256
    assert len(generate(seed=0, split="gate", count=held)) == held
    with pytest.raises(ValueError, match=f"holds {held} tasks"):
        generate(seed=0, split="gate", count=held + 1)
