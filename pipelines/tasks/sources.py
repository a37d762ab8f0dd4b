"""sources: a task source of the run config -> tasks, from a file or a generator."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import combinations_with_replacement, islice
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.splits import comparable, part_of, settings_of
from pipelines.tasks.task_fields import read_task
from pipelines.tasks.task_files import read_rows
from serve_apps.tools.text_match import normalize
from stores.by_name import construct
from stores.types import FAMILY, Task, families

logger = logging.getLogger(__name__)

Check = Callable[[Task, str], None]
"""Raises ValueError for a task, with its location."""


def load_tasks(source: TaskSourceConfig, *, section: str, seed: int, check: Check | None = None) -> list[Task]:
    """Returns all tasks of `iter_tasks`. Raises ValueError if there is none."""
    tasks = list(iter_tasks(source, section=section, seed=seed, check=check))
    if not tasks:
        what = ", ".join(map(str, source.files)) or source.generator
        part = f" in its part {source.split or section!r}" if source.shares else ""
        raise ValueError(f"tasks.{section}: {what} holds no task{part}")
    return tasks


def iter_tasks(source: TaskSourceConfig, *, section: str, seed: int, check: Check | None = None) -> Iterator[Task]:
    """Yields the tasks of one source, in the order of the file or the generator. Their ids are unique.

    `section` ("train", "gate", "test") names the source in messages and is the default part of a file, or split of a
    generator. `check` is called with every task and its location. A file may be larger than memory: only ids are held.
    A row that stands there again is left out, and how many were is in the log. Raises ValueError, with location and fix, for a
    file that is missing or does not match its suffix, a row without prompt or answer, an id of two different tasks, and two tasks that are
    one with different answers.
    """
    located = _generated(source, section, seed) if source.generator is not None else _filed(source, section)
    first: dict[str, tuple[str, int]] = {}
    num_repeated = 0
    answered: dict[int, tuple[str, frozenset[int]]] = {}
    for at, task in located:
        content = hash(_as_json(task, at))
        is_known = task.task_id in first
        other, seen = first.setdefault(task.task_id, (at, content))
        if seen != content:
            raise ValueError(
                f"{at}: task id {task.task_id!r} was used before, at {other}: drop one of the two, or give each row its own `id`"
            )
        if is_known:  # perhaps at the same place: a file may be named twice
            num_repeated += 1
            continue
        if task.answers:
            _check_agrees(task, at, answered)
        if check is not None:
            check(task, at)
        yield task
    if num_repeated:
        logger.warning("tasks.%s: repeated rows that were left out: %d; tasks: %d", section, num_repeated, len(first))
    if source.generator is not None and source.count is not None and len(first) < source.count:
        logger.warning("tasks.%s: the generator has %d tasks, count = %d", section, len(first), source.count)


def _as_json(task: Task, at: str) -> str:
    try:
        return json.dumps(asdict(task), sort_keys=True)
    except TypeError as error:
        raise ValueError(
            f"{at}: task {task.task_id!r}: {error}: write texts, numbers, lists and objects of them"
        ) from None


def _check_agrees(task: Task, at: str, answered: dict[int, tuple[str, frozenset[int]]]) -> None:
    """Raises ValueError where an earlier row asks the same and none of its answers is an answer of this one. Of both only hashes are held."""
    asked = hash((task.prompt, comparable(settings_of(task))))
    right = frozenset(hash(normalize(answer)) for answer in task.answers)
    other, accepted = answered.setdefault(asked, (at, right))
    if accepted.isdisjoint(right):
        raise ValueError(
            f"{at}: {task.prompt[:80]!r} has the answer {task.answers[0]!r:.80}, and at {other} it has another: write both into one row, as "
            "a list, or drop one of the two"
        )


def _generated(source: TaskSourceConfig, section: str, seed: int) -> Iterator[tuple[str, Task]]:
    place = f"tasks.{section}"
    assert source.generator is not None and source.count is not None, "the config demands a count with a generator"
    settings = {"seed": seed, "split": source.split or section, "count": source.count, **source.generator.settings}
    tasks = construct(source.generator.path, settings, place=f"{place}.generator")
    if not isinstance(tasks, Iterable):
        raise ValueError(
            f"{place}.generator: {source.generator.path} gives {tasks!r:.80}: let it return a list of tasks, or yield them"
        )
    for number, task in enumerate(islice(tasks, source.count), 1):  # one that never ends is cut, too
        if not isinstance(task, Task):
            raise ValueError(f"{place}: task {number} is {task!r:.80}, and must be a stores.types.Task")
        yield f"{place}: task {number}", task


def _filed(source: TaskSourceConfig, section: str) -> Iterator[tuple[str, Task]]:
    files = set(source.files)
    tasks = (
        (at, read_task(row, at, _source_name(path, files), is_one_of_several=len(files) > 1))
        for path in source.files
        for at, row in read_rows(path, f"tasks.{section}")
    )
    part = source.split or section
    mine = ((at, task) for at, task in tasks if not source.shares or _part(task, source.shares) == part)
    yield from islice(mine, source.count)


def _source_name(path: Path, files: Collection[Path]) -> str:
    """Returns the name of a file, with that of its folder where another file has the same: gsm8k/train, math/train."""
    is_unique = [file.stem for file in files].count(path.stem) == 1
    return path.stem if is_unique else "/".join(path.with_suffix("").parts[-2:])


def _part(task: Task, shares: Mapping[str, float]) -> str:
    """Returns the part of a file that a task belongs to: all variants of one problem to the same."""
    return part_of(families([task]).get(task.task_id, task.task_id), shares)


def check_disjoint(sections: Mapping[str, Sequence[Task]]) -> None:
    """Raises ValueError if two sections share a task or a family: what is trained on must not be evaluated on. Ids may repeat.

    Tasks are compared as by `are_one_task`. The time is linear in the tasks, for each pair of sets of setting names that tasks
    with one prompt have; those of one source mostly have the same names.
    """
    of_prompt: dict[str, list[tuple[str, Task]]] = defaultdict(list)
    for section, tasks in sections.items():
        for task in tasks:
            of_prompt[task.prompt].append((section, task))
    for same in of_prompt.values():
        if len({section for section, _ in same}) > 1:
            _check_settings_differ(same)
    _check_families_apart(sections)


def _check_families_apart(sections: Mapping[str, Sequence[Task]]) -> None:
    first: dict[str, tuple[str, str]] = {}
    for section, tasks in sections.items():
        for task_id, family in families(tasks).items():
            other, other_id = first.setdefault(family, (section, task_id))
            if other != section:
                raise ValueError(
                    f"tasks.{other} and tasks.{section} share the family {family!r} (ids {other_id!r} and {task_id!r}): variants of one "
                    f"problem belong in one section; where these are different problems, give them different names in `{FAMILY}`"
                )


def _check_settings_differ(tasks: Sequence[tuple[str, Task]]) -> None:
    named: dict[frozenset[str], list[_Placed]] = defaultdict(list)
    for section, task in tasks:
        settings = settings_of(task)
        named[frozenset(settings)].append(_Placed(section, task, settings))
    for (names, some), (others, rest) in combinations_with_replacement(named.items(), 2):
        _check_apart(some, rest, sorted(names & others))


class _Placed(NamedTuple):
    section: str
    task: Task
    settings: Mapping[str, Any]

    def values(self, names: Sequence[str]) -> Hashable:
        return tuple(comparable(self.settings[name]) for name in names)


def _check_apart(some: Sequence[_Placed], others: Sequence[_Placed], names: Sequence[str]) -> None:
    """Raises ValueError if one of `some` and one of `others` are of two sections and have equal values of these settings."""
    sections: dict[Hashable, set[str]] = defaultdict(set)
    for one in some:
        sections[one.values(names)].add(one.section)
    for other in others:
        section, task, settings = other
        if shared := sections.get(other.values(names), set()) - {section}:
            first, second = sorted((min(shared), section))
            values = {name: settings[name] for name in names}
            raise ValueError(
                f"tasks.{first} and tasks.{second} share the task {task.prompt[:80]!r} (id {task.task_id!r} in {section}): "
                "remove it from one of the two; tasks with one prompt are different ones if a setting in their `metadata` "
                f"differs, and {f'{values} does not' if values else 'they have none in common'}"
            )


def digest(tasks: Sequence[Task]) -> str:
    """Returns a hash of a list of tasks: of all fields that a workflow or a credit rule reads, not of their ids alone."""
    text = json.dumps([asdict(task) for task in tasks], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]
