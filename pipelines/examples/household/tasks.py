"""tasks: seed, split, count -> rooms and what to do in them; no room of one split has the places of a room of another.

The test split is therefore made of unseen rooms, as in ALFWorld's `valid_unseen`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelines.examples.household.workflow import DONE
from pipelines.examples.household.world import KINDS, Room, make_room
from pipelines.tasks.splits import draw_tasks, part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.5, "gate": 0.2, "test": 0.25, "sentinel": 0.05}
"""Approximate share of all sets of places in each split."""
MAX_SEED = 10**9


def generate(
    *, seed: int, split: str, count: int, kinds: Sequence[str] = ("put", "clean", "heat", "cool")
) -> list[Task]:
    """Returns `count` tasks of `split`, the kinds in turn; each has a room of its own.

    Raises ValueError for an unknown split or kind.
    """
    if split not in SHARES:
        raise ValueError(f"household: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    if not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"household: kinds = {list(kinds)}: use some of {', '.join(KINDS)}")

    def draw(dice: random.Random, num_tasks: int) -> Task | None:
        number = dice.randrange(MAX_SEED)
        room = make_room(number, kinds[num_tasks % len(kinds)])
        return _task(number, room) if split_of(room) == split else None

    return draw_tasks(draw, seed=seed, split=split, count=count)


def split_of(room: Room) -> str:
    """Returns the split of a room, which depends on its places only."""
    return part_of(repr(sorted(room.places)), SHARES, rest="train")


def _task(number: int, room: Room) -> Task:
    return Task(
        task_id=f"household-{room.kind}-{number}",
        prompt=room.task,
        answers=(DONE,),
        source=room.kind,
        # The same plan does the same kind of task in the same places, wherever the things are.
        metadata={"seed": number, "kind": room.kind, FAMILY: repr((room.kind, sorted(room.places)))},
    )
