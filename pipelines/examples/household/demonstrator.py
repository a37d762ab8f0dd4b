"""demonstrator: agent, task, inputs -> a completion: it plays planner and actor as somebody would who knows how, and is often careless.

The planner sometimes leaves a step out or names another thing. The actor sometimes does something else that is possible. An episode
succeeds in about six of ten.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.examples.household.world import CHANGES, LAMP, PLACES, THINGS, make_room
from pipelines.tasks.splits import settings_of
from stores.types import Task

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
