"""Which held-out tasks a team has practised in another form, and how many there are in what Troupe ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.runners.validate import check_tasks
from pipelines.tasks.likeness import practised, practised_notes
from stores.types import Task

pytestmark = pytest.mark.fast

INFRA = Path(__file__).parents[3] / "infra"
STORY = "{} buys {} red apples and {} green pears at the market, eats two of them on her way home and counts the rest."
NAMES = ("Ann", "Berta", "Clara", "Dora", "Emma", "Frida", "Gerda", "Hanna", "Ida", "Jana")


def task(number: int, prompt: str, answer: str = "", **metadata: Any) -> Task:
    return Task(task_id=str(number), prompt=prompt, answers=(answer,) if answer else (), metadata=metadata)


TRAIN = [
    *(task(i, f"Compute {i} * {i + 7} - 3.", str(i * (i + 7) - 3)) for i in range(20, 120)),
    *(task(200 + i, STORY.format(name, 11 + i, 31 - 2 * i), str(40 - i)) for i, name in enumerate(NAMES)),
    task(300, "Write f(a): a plus 5.", tests=["assert f(1) == 6"]),
    task(301, "Go to the kitchen.", seed=41, rooms=3),
]


@pytest.mark.parametrize(
    ("held_out", "like"),
    [
        (task(1, "Compute 57 * 50 - 3.", "2847"), "50"),  # another order
        (task(1, "COMPUTE  50 \u00d7 57 - 3!", "2847"), "50"),  # another spelling
        (task(1, STORY.format("Zoe", 14, 25), "37"), "203"),  # another name
        (task(1, "Write f(a): a plus 5!", tests=["assert f(1) == 6"]), "300"),
        (task(1, "Go to the kitchen!", seed=41, rooms=3), "301"),
        (task(1, "Compute 57 * 51 - 3.", "2904"), ""),  # another task
        (task(1, "Compute 57 * 50 - 3.", "2848"), ""),  # another answer
        (task(1, STORY.format("Clara", 23, 13), "34"), ""),  # other numbers
        (task(1, "Write f(a): a plus 5!", tests=["assert f(1) == 5"]), ""),  # other tests
        (task(1, "Go to the kitchen!", seed=42, rooms=3), ""),  # another house
    ],
)
def test_a_task_in_another_form_is_found_and_another_task_is_none(held_out: Task, like: str) -> None:
    assert [one.like.task_id for one in practised(TRAIN, [held_out])] == ([like] if like else [])


def test_the_note_says_how_many_and_shows_the_one_that_is_most_alike() -> None:
    gate = [task(1, "Compute 57 * 50 - 3.", "2847"), task(2, "Compute 3 * 4 - 3.", "9")]
    (note,) = practised_notes({"train": TRAIN, "gate": gate, "test": gate[1:]})
    assert note.startswith("tasks.gate: 1 of 2 tasks are like one of tasks.train")
    assert "'Compute 57 * 50 - 3.' and 'Compute 50 * 57 - 3.'" in note
    others = [task(i, f"Compute {i} * 3 - 4.", str(3 * i - 4)) for i in range(400, 440)]
    assert practised_notes({"train": TRAIN, "gate": [gate[0], *others]}) == [], "one of 41 says nothing"
    assert practised_notes({"train": TRAIN}) == practised([], gate) == practised(TRAIN, []) == []


MOST_OF_SUMS = 0.12
"""The largest share of a held-out section of sums that is like a training task: the same numbers, as 5 + 1 * 6 and 6 + 1 * 5."""


@pytest.mark.nightly
@pytest.mark.parametrize("path", sorted(INFRA.glob("**/*.yaml")), ids=lambda path: path.stem)
def test_hardly_a_task_that_measures_was_practised_in_another_form(path: Path) -> None:
    if not re.search("^(workflow|extends):", path.read_text(), re.MULTILINE):
        pytest.skip("no run config")
    config = load_config(path)
    sections = check_tasks(config)
    generator = config.tasks.train.generator
    are_sums = generator is not None and re.search("arithmetic|small_sums", generator.path)
    for section in sections.keys() & {"gate", "test"}:
        found = practised(sections["train"], sections[section])
        assert len(found) <= (MOST_OF_SUMS if are_sums else 0) * len(sections[section]), found[:3]
