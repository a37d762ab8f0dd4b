"""demonstrator: agent, task, inputs -> a completion: it plays planner and actor as somebody would who knows how, and is often careless.

The planner sometimes names the last part of the task too early. The actor sometimes chooses any command that is possible.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.tasks.splits import settings_of
from stores.types import Task
from tests.worlds.alfworld.games import LAMP, LAMP_PLACE, STATIONS, make_room

SHARE_CARELESS_PLAN, SHARE_CARELESS_ACT = 0.1, 0.1
MADE = {"clean": "clean", "heat": "hot", "cool": "cool"}
"""By kind, the word for what was made of a thing."""


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "planner":
        return f"<GOAL>{_goal(task, inputs['holding'], rng)}</GOAL>"
    possible = inputs["possible"].split(", ")
    careless = rng.random() < SHARE_CARELESS_ACT
    return f"<ACT>{rng.choice(possible) if careless else _command(inputs['goal'], inputs['unseen'], possible)}</ACT>"


def _goal(task: Task, holding: str, rng: random.Random) -> str:
    room = make_room(**settings_of(task))
    last = f"look at {room.thing}" if room.kind == "look" else f"put {room.thing} in {room.target}"
    if rng.random() < SHARE_CARELESS_PLAN:
        return last
    if room.thing not in holding.split():
        return f"find {room.thing}"
    if room.kind in MADE and MADE[room.kind] not in holding.split():
        return f"{room.kind} {room.thing}"
    return last


def _command(goal: str, unseen: str, possible: list[str]) -> str:
    """The next command towards a goal: what does it if it is possible, else what leads there."""
    verb, _, rest = goal.partition(" ")
    thing, _, target = rest.partition(" in ")
    if verb == "find":
        does, place = f"take {thing} ", unseen.split(", ")[0]
    elif verb in STATIONS:
        does, place = f"{verb} {thing} ", STATIONS[verb]
    elif verb == "put":
        does, place = f"move {thing} 1 to {target} ", target
    else:
        does, place = f"use {LAMP} ", LAMP_PLACE
    for beginning in (does, f"open {place}", f"go to {place}"):
        if found := [command for command in possible if command.startswith(beginning)]:
            return found[0]
    return "look"
