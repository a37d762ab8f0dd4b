"""Which tasks an iteration trains on, and which a decision rests on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import collected

from pipelines.config.sections import CollectConfig
from pipelines.stages.collect import iteration_tasks
from pipelines.stages.evaluate import decision_tasks
from pipelines.tasks.splits import part_of, task_slice
from stores.types import Task

pytestmark = pytest.mark.fast

TASKS = [Task(task_id=f"t{i}", prompt=str(i), answers=(str(i),)) for i in range(10)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.task_id for task in tasks]


def test_a_pass_over_the_tasks_takes_each_once_and_the_next_pass_is_in_another_order() -> None:
    slices = [ids(task_slice(TASKS, number=k, count=5, seed="0")) for k in (1, 2, 3, 4)]
    assert sorted(slices[0] + slices[1]) == sorted(slices[2] + slices[3]) == sorted(ids(TASKS))
    assert slices[:2] != slices[2:]


def test_a_slice_depends_on_seed_and_iteration_only() -> None:
    assert ids(task_slice(TASKS, number=3, count=4, seed="1")) == ids(task_slice(TASKS, number=3, count=4, seed="1"))
    assert ids(task_slice(TASKS, number=3, count=4, seed="1")) != ids(task_slice(TASKS, number=3, count=4, seed="2"))


def test_no_task_comes_twice_in_a_slice_where_the_count_does_not_divide_the_tasks() -> None:
    for iteration in range(1, 9):
        assert len(set(ids(task_slice(TASKS, number=iteration, count=4, seed="0")))) == 4


def test_an_iteration_larger_than_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks_per_iteration = 12 \(times oversample\) but tasks\.train holds 10"):
        iteration_tasks(fake_run(oversample=3), begun(1))


def test_keys_fall_into_parts_by_their_shares_and_the_rest_is_named() -> None:
    parts = [part_of(f"t{i}", {"gate": 0.25, "test": 0.25}, rest="train") for i in range(1000)]
    assert parts == [part_of(f"t{i}", {"gate": 0.25, "test": 0.25}, rest="train") for i in range(1000)]
    assert {part: round(parts.count(part) / 1000, 1) for part in set(parts)} == {"gate": 0.2, "test": 0.2, "train": 0.5}


def test_decisions_rest_on_fresh_tasks_while_they_last() -> None:
    first, second = (ids(decision_tasks(fake_run(per_decision=5), k)) for k in (1, 2))
    assert not set(first) & set(second)
    assert decision_tasks(fake_run(), 7) == TASKS


def test_looks_are_at_tasks_in_an_order_by_chance() -> None:
    first, second = (ids(decision_tasks(fake_run(per_look=3), k)) for k in (1, 2))
    assert sorted(first) == sorted(second) == ids(TASKS)
    assert first != second and ids(TASKS) not in (first, second)


def test_iterations_that_are_not_evaluated_take_no_tasks_of_the_gate() -> None:
    run = fake_run(per_decision=3, every=2)  # 5 iterations: decisions after 2, 4 and, as the last one, 5
    taken = [task for k in (2, 4, 5) for task in ids(decision_tasks(run, k))]
    assert len(set(taken)) == 9


def test_a_run_that_is_continued_after_its_last_decision_goes_on_with_fresh_tasks_of_the_gate() -> None:
    run = fake_run(per_decision=2, every=2)
    left_out = {"verdict": "skipped", "condition": "evaluate.every = 2", "skipped": "evaluate.every = 2"}
    run.done.update({1: left_out, 2: {}, 3: {}, 4: {}, 5: {}})  # 3, then 5, were the last iterations
    taken = [ids(decision_tasks(run, k)) for k in (2, 3, 4, 5, 6)]
    assert len({task for decision in taken for task in decision}) == 10
    run.done.update({6: {}, 7: left_out})
    assert [ids(decision_tasks(run, k)) for k in (2, 3, 4, 5, 6)] == taken, "a repeated stage plays the same tasks"


def fake_run(
    *,
    per_decision: int | None = None,
    per_look: int | None = None,
    every: int = 1,
    **collect: Any,
) -> Any:
    """What `iteration_tasks` and `decision_tasks` need of a run: 10 tasks, and in `done` what stage evaluate left by iteration."""
    evaluate = SimpleNamespace(tasks_per_decision=per_decision, tasks_per_look=per_look, every=every)
    settings = CollectConfig(tasks_per_iteration=4, **collect)
    done: dict[int, dict[str, Any]] = {}
    return SimpleNamespace(
        config=SimpleNamespace(collect=settings, evaluate=evaluate, seed=0),
        tasks=lambda section: TASKS,
        run_id="run",
        key=lambda iteration, stage: iteration,
        journal=SimpleNamespace(finished=lambda run_id, stage: list(done), ref=done.get),
        done=done,
    )


def begun(number: int, carried: tuple[str, ...] | None = None) -> Any:
    """An iteration as collect is given it. Args: carried: what the one before carried over; None: it has collected nothing."""
    before = None if carried is None else collected(carried=carried)
    return SimpleNamespace(number=number, before=[SimpleNamespace(find=lambda kind: before)])


def test_without_over_sampling_an_iteration_begins_the_tasks_that_it_trains_on() -> None:
    assert iteration_tasks(fake_run(), begun(2)) == task_slice(TASKS, number=2, count=4, seed="0")


def test_over_sampling_begins_so_many_times_the_tasks() -> None:
    assert len(iteration_tasks(fake_run(oversample=1.5), begun(1))) == 6
    assert len(iteration_tasks(fake_run(oversample=1.1), begun(1))) == 5


def test_tasks_carried_over_come_first_and_displace_fresh_ones() -> None:
    fresh = ids(iteration_tasks(fake_run(), begun(2)))
    left = [task.task_id for task in TASKS if task.task_id not in fresh][:1] + fresh[2:3]
    found = ids(iteration_tasks(fake_run(), begun(2, tuple(left))))
    assert found[:2] == left
    assert len(set(found)) == len(found) == 4
    assert found[2:] == [task for task in fresh if task not in left][:2]


def test_tasks_that_are_cut_are_not_carried() -> None:
    tasks = iteration_tasks(fake_run(incomplete_groups="drop"), begun(2, ("t1",)))
    assert tasks == task_slice(TASKS, number=2, count=4, seed="0")


def test_a_carried_task_that_the_set_lost_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['gone'\] were carried over from iteration 1, but tasks\.train lost them"):
        iteration_tasks(fake_run(), begun(2, ("gone",)))
