"""Which tasks an iteration trains on, and which a decision rests on."""

from __future__ import annotations

import pytest

from pipelines.collect import task_slice
from pipelines.evaluate import decision_tasks
from stores.types import Task

TASKS = [Task(task_id=f"t{i}", prompt=str(i), answers=(str(i),)) for i in range(10)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.task_id for task in tasks]


def test_a_pass_over_the_tasks_takes_each_once_and_the_next_pass_is_in_another_order() -> None:
    slices = [ids(task_slice(TASKS, iteration=k, count=5, seed=0)) for k in (1, 2, 3, 4)]
    assert sorted(slices[0] + slices[1]) == sorted(slices[2] + slices[3]) == sorted(ids(TASKS))
    assert slices[:2] != slices[2:]


def test_a_slice_depends_on_seed_and_iteration_only() -> None:
    assert ids(task_slice(TASKS, iteration=3, count=4, seed=1)) == ids(task_slice(TASKS, iteration=3, count=4, seed=1))
    assert ids(task_slice(TASKS, iteration=3, count=4, seed=1)) != ids(task_slice(TASKS, iteration=3, count=4, seed=2))


def test_no_task_comes_twice_in_a_slice_where_the_count_does_not_divide_the_tasks() -> None:
    for iteration in range(1, 9):
        assert len(set(ids(task_slice(TASKS, iteration=iteration, count=4, seed=0)))) == 4


def test_a_slice_larger_than_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks_per_iteration = 11 \(times oversample\) but tasks\.train holds 10"):
        task_slice(TASKS, iteration=1, count=11, seed=0)


def test_decisions_rest_on_fresh_tasks_while_they_last() -> None:
    first, second = (ids(decision_tasks(TASKS, iteration=k, count=5, seed=0)) for k in (1, 2))
    assert not set(first) & set(second)
    assert decision_tasks(TASKS, iteration=7, count=None, seed=0) == TASKS
