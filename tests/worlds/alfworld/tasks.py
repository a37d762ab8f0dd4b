"""tasks: seed, split, count -> games of ALFWorld; no room of one split, with its places and where its things are, is in another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256

from pipelines.examples.household.workflow import DONE
from pipelines.tasks.splits import draw_tasks, part_of
from stores.types import FAMILY, Task
from tests.worlds.alfworld.games import KINDS, Room, make_room

SHARES = {"train": 0.5, "gate": 0.2, "test": 0.25, "sentinel": 0.05}
"""Approximate share of all rooms in each split."""
MAX_SEED = 10**9


def generate(*, seed: int, split: str, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Task]:
    """Returns `count` tasks of `split`, the kinds in turn; each has a room of its own.

    Raises ValueError for an unknown split or kind.
    """
    if split not in SHARES:
        raise ValueError(f"alfworld: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    if not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"alfworld: kinds = {list(kinds)}: use some of {', '.join(KINDS)}")

    def draw(dice: random.Random, num_tasks: int) -> Task | None:
        number = dice.randrange(MAX_SEED)
        room = make_room(number, kinds[num_tasks % len(kinds)])
        return _task(number, room) if split_of(room) == split else None

    return draw_tasks(draw, seed=seed, split=split, count=count)


def split_of(room: Room) -> str:
    """Returns the split of a room, which depends on its places and on where its things are."""
    return part_of(_family(room), SHARES, rest="train")


def _family(room: Room) -> str:
    """Returns what a room has in common with others of the same places and things."""
    return repr((room.places, sorted(room.things.items())))


def _task(number: int, room: Room) -> Task:
    return Task(
        task_id=f"alfworld-{room.kind}-{number}",
        prompt=room.task,
        answers=(DONE,),
        source=room.kind,
        metadata={"seed": number, "kind": room.kind, FAMILY: sha256(_family(room).encode()).hexdigest()[:16]},
    )
