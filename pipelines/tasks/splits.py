"""splits: which part of a set of tasks is for what, and which tasks an iteration or a decision takes. Always the same ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

from serve_apps.tools.reference_fields import public_task
from stores.types import Task

T = TypeVar("T")

SECTIONS = ("train", "gate", "test", "sentinel")
"""Sets of tasks that a run config may have; no two of them share a task, see `are_one_task`."""
HELD_OUT = SECTIONS[1:]
"""Those that nothing is trained on."""
BOOKKEEPING = ("id", "idx", "index", "uid", "uuid", "split", "subset", "source", "data_source", "row")
"""Names in a task's metadata that say where a row was found. Names that end in `_id` are others."""


def settings_of(task: Task) -> dict[str, Any]:
    """Returns what a task's metadata says of the problem: the settings of its world, for example the seed of a house.

    Answers and tests are none, nor is where the row was found: one question has another `index` and `split` in each file.
    """
    metadata = public_task(task)["metadata"]
    return {k: v for k, v in metadata.items() if k.lower() not in BOOKKEEPING and not k.lower().endswith("_id")}


def are_one_task(one: Task, other: Task) -> bool:
    """Whether two tasks pose one problem: the prompts are equal, and no setting that both have differs."""
    return one.prompt == other.prompt and have_same_settings(one, other)


def have_same_settings(one: Task, other: Task) -> bool:
    """Whether no setting that both tasks have differs."""
    settings, others = settings_of(one), settings_of(other)
    return all(comparable(settings[name]) == comparable(others[name]) for name in settings.keys() & others.keys())


def comparable(value: Any) -> Hashable:
    """Returns what equals that of another JSON value where the two are equal: 1 is 1.0, and keys have no order."""
    if isinstance(value, Mapping):
        return "mapping", frozenset((str(key), comparable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(comparable(item) for item in value)
    if isinstance(value, float) and math.isnan(value):
        return ("nan",)
    return value


def part_of(key: str, shares: Mapping[str, float], *, rest: str = "") -> str:
    """The part that a key belongs to, the same on any machine and whatever else there is.

    Args:
        key: what identifies a task.
        shares: by part, its share of all keys; where they sum to less than 1, `rest` gets the others.
    """
    position = int.from_bytes(sha256(key.encode()).digest()[:8], "big") / 2**64
    for part, share in shares.items():
        position -= share
        if position < 0:
            return part
    return rest


def share_out(
    items: Iterable[T], sizes: Mapping[str, int], *, problem: Callable[[T], Hashable], dice: random.Random
) -> dict[str, list[T]]:
    """Shares out items by chance: each split gets as many as `sizes` says, and items that pose one problem stay together.

    A problem goes to the first split that has room for all of its items. What finds no room is left out.

    Args:
        problem: what two forms of one problem have in common, as `7 * 8` and `8 * 7`.
    """
    forms: dict[Hashable, list[T]] = {}
    for item in items:
        forms.setdefault(problem(item), []).append(item)
    problems = list(forms.values())
    dice.shuffle(problems)
    parts: dict[str, list[T]] = {split: [] for split in sizes}
    for own in problems:
        split = next((split for split, size in sizes.items() if len(parts[split]) + len(own) <= size), None)
        if split is not None:
            parts[split] += own
    for part in parts.values():
        dice.shuffle(part)
    return parts


def draw_tasks(draw: Callable[[random.Random, int], Task | None], *, seed: int, split: str, count: int) -> list[Task]:
    """Draws until there are `count` tasks with ids of their own; the same for the same seed and split.

    Args:
        draw: called with the dice and the number of tasks so far; None: what was drawn belongs to another split.
    """
    dice = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        task = draw(dice, len(tasks))
        if task is not None:
            tasks.setdefault(task.task_id, task)
    return list(tasks.values())


def task_slice(
    tasks: Sequence[Task], *, number: int, count: int, seed: str, families: Mapping[str, str] | None = None
) -> list[Task]:
    """The tasks of slice `number`, counted from 1: each pass over the set is a new seeded order.

    No task comes twice within a slice, nor within a pass. `count` must not be above the number of tasks.

    Args:
        families: by task id, which tasks stand beside one another in that order.
    """
    slices_per_pass = len(tasks) // count
    # Tasks that fill no whole slice at the end of a pass wait for the next one, whose order is another.
    pass_number, position = divmod(number - 1, slices_per_pass)
    together: dict[str, list[Task]] = {}
    for task in tasks:
        together.setdefault((families or {}).get(task.task_id, task.task_id), []).append(task)
    order = list(together.values())
    random.Random(f"{seed}/{pass_number}").shuffle(order)
    return list(chain.from_iterable(order))[position * count : (position + 1) * count]


def check_independent(tasks: Iterable[str], families: Mapping[str, str]) -> None:
    """Raises ValueError where two tasks are variants of one problem, which the exact test would count twice."""
    names = Counter(families[task_id] for task_id in tasks if task_id in families)
    name, num = next(iter(names.most_common(1)), ("", 0))
    if num > 1:
        raise ValueError(
            f"{num} tasks are of the family {name!r}, and the exact test (evaluate.test: mcnemar) takes tasks for independent: use "
            "evaluate.test: auto"
        )
