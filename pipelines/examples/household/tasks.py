"""tasks: seed, split, count -> rooms and what to do in them; no room of one split has the places of a room of another.

The test split is therefore made of unseen rooms, as in ALFWorld's `valid_unseen`.

`demonstrate`: agent, task, inputs -> a completion: it plays planner and actor as somebody would who knows how, and is often careless.
The planner sometimes leaves a step out or names another thing. The actor sometimes does something else that is possible. An episode
succeeds in about six of ten.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from pipelines.examples.household.workflow import DONE
from pipelines.examples.household.world import CHANGES, KINDS, LAMP, PLACES, THINGS, Room, make_room
from pipelines.tasks.splits import draw_tasks, part_of, settings_of
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


SHARE_CARELESS_PLAN, SHARE_CARELESS_ACT = 0.15, 0.12


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "planner":
        return f"<GOAL>{_goal(task, inputs['holding'], rng)}</GOAL>"
    return f"<ACT>{_act(inputs, rng)}</ACT>"


def _goal(task: Task, holding: str, rng: random.Random) -> str:
    room = make_room(**settings_of(task))
    thing = room.thing
    last = f"use desklamp 1 with {thing}" if room.kind == "look" else f"put {thing} in {room.target}"
    if rng.random() < SHARE_CARELESS_PLAN:
        return rng.choice([f"find {rng.choice(THINGS)}", last])
    if thing not in holding.split():
        return f"find {thing}"
    if room.kind in CHANGES and CHANGES[room.kind][0] not in holding.split():
        return f"{room.kind} {thing}"
    return last


def _act(inputs: Mapping[str, str], rng: random.Random) -> str:
    at, see = inputs["at"], inputs["see"]
    if rng.random() < SHARE_CARELESS_ACT:
        return rng.choice([f"go to {rng.choice(PLACES)}", f"open {at}", f"close {at}", "look"])
    verb, _, rest = inputs["goal"].partition(" ")
    if verb == "find":
        if rest in see.partition("You see ")[2].rstrip(".").split(", "):
            return f"take {rest} from {at}"
        if see.endswith("It is closed."):
            return f"open {at}"
        return f"go to {inputs['unseen'].split(', ')[0]}" if inputs["unseen"] != "nothing" else "look"
    if verb in CHANGES:
        place = CHANGES[verb][1]
        return f"{verb} {rest} with {place}" if at == place else f"go to {place}"
    if verb == "use":
        return inputs["goal"] if at == LAMP else f"go to {LAMP}"
    thing, _, target = rest.partition(" in ")
    if at != target:
        return f"go to {target}"
    return f"open {at}" if see.endswith("It is closed.") else f"put {thing} in {target}"
