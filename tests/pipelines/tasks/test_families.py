"""Families: variants of one problem are split, taken and looked at together, and no workflow or world sees their name."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipelines.config.sections import TaskSourceConfig
from pipelines.evaluation.statistics import Resampling, paired_interval, paired_sequence
from pipelines.stages.evaluate import look_sizes
from pipelines.tasks.sources import check_disjoint, load_tasks
from pipelines.tasks.splits import are_one_task, check_independent, settings_of, task_slice
from stores.types import Task, families

pytestmark = pytest.mark.fast


def variant(task_id: str, family: str) -> Task:
    return Task(task_id=task_id, prompt=f"{task_id}?", answers=("1",), metadata={"family": family})


def test_variants_of_one_problem_are_in_one_section_and_one_part_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tasks\.train and tasks\.gate share the family '7x8' \(ids 'a' and 'b'\).*one section"
    ):
        check_disjoint({"train": [variant("a", "7x8")], "gate": [variant("b", "7x8")]})
    check_disjoint({"train": [variant("a", "7x8"), variant("b", "7x8")], "gate": [variant("c", "3x4")]})
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"id": f"{n}-{form}", "question": f"{n} {form}?", "answer": "1", "extra_info": {"family": str(n)}}
        for n in range(40)
        for form in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaskSourceConfig(path=str(path), shares={"train": 0.5, "gate": 0.5})
    of_train, of_gate = (
        {t.metadata["family"] for t in load_tasks(source, section=part, seed=0)} for part in ("train", "gate")
    )
    assert of_train and of_gate and not of_train & of_gate


@pytest.mark.parametrize(
    "path",
    [
        "arithmetic",
        "small_sums",
        "counting_house",
        "household",
        "small_functions",
        "made_up_facts",
        "nim",
        "miniwob",
        "repair",
        "alfworld",
    ],
)
def test_every_generator_names_families_that_stay_in_one_split(path: str) -> None:
    elsewhere = {"alfworld": "tests.worlds", "miniwob": "tests.worlds", "counting_house": "tests.algorithms"}
    folder = elsewhere.get(path, "pipelines.examples")
    generate = importlib.import_module(f"{folder}.{path}.tasks").generate
    seen: dict[str, str] = {}
    for split in ("train", "gate", "test"):
        tasks = generate(seed=1, split=split, count=30)
        assert len(families(tasks)) == 30
        assert all(seen.setdefault(family, split) == split for family in families(tasks).values())


def of_families(*sizes: int) -> list[Task]:
    """Families of so many tasks, of which one follows the other as a file may have them: in turn."""
    names = [(family, number) for number in range(max(sizes)) for family, size in enumerate(sizes) if number < size]
    return [variant(f"{family}.{number}", f"f{family}") for family, number in names]


def test_a_slice_and_a_look_take_families_together() -> None:
    tasks = of_families(3, 1, 2, 4, 2)
    taken = task_slice(tasks, number=1, count=12, seed="0", families=families(tasks))
    names = [families(taken)[task.task_id] for task in taken]
    assert len(taken) == 12 and [n for n, m in zip(names, [None, *names], strict=False) if n != m] == list(
        dict.fromkeys(names)
    )
    ends = {
        i + 1 for i, (name, following) in enumerate(zip(names, [*names[1:], None], strict=True)) if name != following
    }
    sizes = look_sizes(taken, 2)
    assert sizes[-1] == 12 and set(sizes) <= ends and all(b - a >= 2 for a, b in pairwise([0, *sizes[:-1]]))


def test_the_task_that_a_family_is_named_for_belongs_to_it() -> None:
    """Three forms of 40 problems, of which the first names no family: bets on weights above 1 were no numbers."""
    first = [Task(task_id=f"q{i}", prompt=f"q{i}?", answers=("1",)) for i in range(40)]
    tasks = [task for one in first for task in (one, variant(f"{one.task_id}a", one.task_id))]
    tasks += [variant(f"{one.task_id}b", one.task_id) for one in first]
    named = families(tasks)
    assert named == {task.task_id: task.task_id.rstrip("ab") for task in tasks}
    with pytest.raises(ValueError, match="3 tasks are of the family 'q0'"):
        check_independent([task.task_id for task in tasks], named)
    together = task_slice(tasks, number=1, count=120, seed="0", families=named)
    assert look_sizes(together, 1) == list(range(3, 121, 3))
    won, lost = ({task.task_id: [outcome] for task in together} for outcome in (1.0, 0.0))
    with np.errstate(all="raise"):
        gain = paired_sequence(won, lost, Resampling(families=named), planned=120)
    assert gain.low == pytest.approx(paired_interval(won, lost, Resampling(families=named)).low)


def test_tasks_without_families_are_taken_and_looked_at_as_ever() -> None:
    tasks = [Task(task_id=f"t{i}", prompt=str(i), answers=("1",)) for i in range(10)]
    assert families(tasks) == {}
    assert task_slice(tasks, number=2, count=4, seed="0", families={}) == task_slice(tasks, number=2, count=4, seed="0")
    assert look_sizes(tasks, 4) == [4, 8, 10] and look_sizes(tasks, None) == look_sizes(tasks, 10) == [10]


def test_a_family_is_no_setting_of_a_world_and_does_not_tell_tasks_apart() -> None:
    one, other = (
        Task(task_id=name, prompt="p", answers=("1",), metadata={"seed": 3, "family": name}) for name in ("a", "b")
    )
    assert settings_of(one) == {"seed": 3} and are_one_task(one, other)
