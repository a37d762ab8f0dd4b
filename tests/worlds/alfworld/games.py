"""games: seed and kind -> a room of ALFWorld, its task, and the problem in PDDL that its engine plays.

ALFWorld's package has the rules, the words and the goals, and no games. A game here has places and things of ALFWorld's own lists, one
thing of a type, and places that hold only what ALFWorld lets them hold. This module needs nothing but Python, so that tasks and
demonstrations are made without ALFWorld.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = {
    "put": "pick_and_place_simple",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "look": "look_at_obj_in_light",
}
"""By kind, ALFWorld's name of the task type."""
TEXTS = {
    "put": "put a {obj} in {recep}",
    "clean": "put a clean {obj} in {recep}",
    "heat": "put a hot {obj} in {recep}",
    "cool": "put a cool {obj} in {recep}",
    "look": "look at {obj} under the {toggle}",
}
"""By kind, the first of ALFWorld's sentences for the task."""
STATIONS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""By kind, the type of the place where a thing is changed."""
LAMP, LAMP_PLACE = "desklamp", "desk"
OPENABLE = ("cabinet", "drawer", "fridge", "microwave", "safe")
"""Types of places that must be opened before one sees what is in them."""
NUM_THINGS = 6

KITCHEN = {
    "cabinet": (1, 3),
    "countertop": (1, 2),
    "diningtable": (0, 1),
    "drawer": (1, 3),
    "fridge": (1, 1),
    "garbagecan": (1, 1),
    "microwave": (1, 1),
    "shelf": (0, 2),
    "sinkbasin": (1, 1),
}
BEDROOM = {
    "bed": (1, 1),
    "desk": (1, 1),
    "drawer": (1, 3),
    "dresser": (0, 1),
    "garbagecan": (1, 1),
    "safe": (0, 1),
    "shelf": (0, 2),
    "sidetable": (1, 2),
}
"""By type of place, how many of it a room has, at least and at most."""

FOOD = ("apple", "bread", "egg", "lettuce", "potato", "tomato")
DISHES = ("cup", "mug", "plate")
CUTLERY = ("fork", "knife", "spatula", "spoon")
SMALL = ("cd", "cellphone", "keychain", "watch")
HOLDS = {
    "cabinet": DISHES,
    "countertop": FOOD + DISHES + CUTLERY,
    "diningtable": FOOD + DISHES + CUTLERY,
    "fridge": FOOD + DISHES,
    "microwave": ("apple", "bread", "egg", "potato", "tomato", *DISHES),
    "sinkbasin": ("apple", "egg", "lettuce", "potato", "tomato", *DISHES, *CUTLERY),
    "drawer": ("book", "pen", *CUTLERY, *SMALL),
    "shelf": ("book", "pen", *DISHES, *SMALL),
    "garbagecan": ("cd", "pen", *FOOD),
    "bed": ("book", "cellphone", "laptop"),
    "desk": ("book", "laptop", "pen", *SMALL),
    "dresser": ("book", "laptop", "pen", *SMALL),
    "sidetable": ("book", "laptop", "pen", *SMALL),
    "safe": SMALL,
}
"""By type of place, things that it can hold: a part of ALFWorld's list."""
FITS = {
    "put": FOOD + DISHES + CUTLERY,
    "clean": ("apple", "egg", "lettuce", "potato", "tomato", *DISHES, *CUTLERY),
    "heat": ("apple", "bread", "egg", "potato", "tomato", *DISHES),
    "cool": FOOD + DISHES,
    "look": ("book", "laptop", "pen", *SMALL),
}
"""By kind, things that the task can be about."""
PROPERTIES = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}


@dataclass(frozen=True)
class Room:
    """What a seed makes."""

    kind: str
    places: tuple[str, ...]
    """Their names as ALFWorld says them: `cabinet 2`."""
    things: Mapping[str, str]
    """By type of thing, the place where it is; there is one of each, `mug 1`."""
    thing: str
    """Type of the thing that the task is about."""
    target: str
    """Type of the place where it shall end; empty for `look`."""

    @property
    def task(self) -> str:
        """What shall be done, in ALFWorld's words."""
        return TEXTS[self.kind].format(obj=self.thing, recep=self.target, toggle=LAMP)


def make_room(seed: int, kind: str) -> Room:
    """Returns the room of a seed; the same on any machine.

    Raises ValueError for a kind that there is not.
    """
    if kind not in KINDS:
        raise ValueError(f"alfworld: kind {kind!r} does not exist: use one of {', '.join(KINDS)}")
    dice = random.Random(f"{seed}/{kind}")
    plan = BEDROOM if kind == "look" else KITCHEN
    numbers = {of: dice.randint(least, most) for of, (least, most) in plan.items()}
    places = tuple(f"{of} {n + 1}" for of, number in numbers.items() for n in range(number))
    thing = dice.choice(FITS[kind])
    others = [other for other in FITS["look" if kind == "look" else "put"] if other != thing]
    things = {
        one: dice.choice([place for place in places if one in HOLDS[type_of(place)]])
        for one in (thing, *dice.sample(others, NUM_THINGS - 1))
    }
    refused = {type_of(things[thing]), STATIONS.get(kind)}  # a task that is done at once, or at the station, is none
    targets = [of for of, number in numbers.items() if number and thing in HOLDS[of] and of not in refused]
    target = "" if kind == "look" else dice.choice(targets)
    return Room(kind, places, things, thing, target)


def type_of(name: str) -> str:
    """Returns the type of a place or thing: `cabinet` of `cabinet 2`."""
    return name.partition(" ")[0]


def problem(room: Room, goal: str) -> str:
    """Returns the problem in PDDL. Args: goal: ALFWorld's, `(:goal ...)` with the bracket that closes the problem."""
    ids = _ids(room.places)
    kinds_of_place = sorted({type_of(place) for place in room.places} | set(STATIONS.values()))
    kinds_of_thing = sorted({*room.things, LAMP, "knife", "butterknife"})  # the rules name both knives
    locations = {place: f"loc{number}" for number, place in enumerate(room.places, start=1)}
    objects = [f"agent1 - agent loc0 - location {' '.join(f'{of}type - rtype' for of in kinds_of_place)}"]
    objects += [f"{of}type - otype" for of in kinds_of_thing]
    objects += [f"{ids[place]} - receptacle {locations[place]} - location" for place in room.places]
    facts = ["(= (total-cost) 0)", "(atlocation agent1 loc0)"]
    for place in room.places:
        place_type = type_of(place)
        facts += [f"(receptacletype {ids[place]} {place_type}type)"]
        facts += [f"(receptacleatlocation {ids[place]} {locations[place]})"]
        facts += [f"(openable {ids[place]})"] * (place_type in OPENABLE)
    facts += [
        f"(cancontain {of}type {thing}type)"
        for of in sorted(set(map(type_of, room.places)))
        for thing in room.things
        if thing in HOLDS[of]
    ]
    where = {**room.things, **({LAMP: f"{LAMP_PLACE} 1"} if room.kind == "look" else {})}
    for thing, place in where.items():
        thing_id = f"{thing}_bar_0"
        objects.append(f"{thing_id} - object")
        facts += [f"(objecttype {thing_id} {thing}type)", f"(inreceptacle {thing_id} {ids[place]})"]
        facts += [f"(objectatlocation {thing_id} {locations[place]})"]
        facts += [f"(toggleable {thing_id})" if thing == LAMP else f"(pickupable {thing_id})"]
        facts += [f"({said} {thing_id})" for kind, said in PROPERTIES.items() if thing in FITS[kind]]
    parts = ("(define (problem room) (:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")", goal)
    return "\n".join(parts)


def _ids(places: tuple[str, ...]) -> dict[str, str]:
    """By place, the name that ALFWorld turns into the place's: it numbers those of a type in falling order of their names.

    A basin's has another form, because ALFWorld adds `basin` to what stands before the first bar.
    """
    numbers = Counter(map(type_of, places))
    ids = {}
    for place in places:
        of, _, number = place.partition(" ")
        rank = numbers[of] - int(number)
        ids[place] = f"sink_bar_{rank}_bar_sinkbasin" if of == "sinkbasin" else f"{of}_bar_{rank}"
    return ids


def traj_data(room: Room) -> dict[str, object]:
    """Returns what ALFWorld keeps beside a game as `traj_data.json`, as far as its hand-coded expert reads it."""
    parameters = {
        "object_target": room.thing,
        "parent_target": room.target,
        "mrecep_target": "",
        "object_sliced": False,
    }
    toggle = LAMP if room.kind == "look" else ""
    return {"task_type": KINDS[room.kind], "pddl_params": {**parameters, "toggle_target": toggle}}
