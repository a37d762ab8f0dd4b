"""world: a room of a household, after ALFWorld (Shridhar et al. 2021, arXiv 2010.03768): words in, words out, a seed says it all.

    look                     go to fridge 1         open fridge 1          close fridge 1
    take egg from fridge 1   put egg in table 1     clean egg with sinkbasin 1
    heat egg with microwave 1    cool egg with fridge 1    use desklamp 1 with egg

It needs nothing but Python, so that a worker of any interpreter can play it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

OPEN = ("table 1", "shelf 1", "desk 1", "countertop 1", "sinkbasin 1")
CLOSED = ("drawer 1", "cabinet 1", "fridge 1", "microwave 1")
"""Places that must be opened before one sees what is in them."""
PLACES = OPEN + CLOSED
THINGS = ("apple", "potato", "tomato", "egg", "mug", "plate", "bread", "knife", "cup", "pan")
KINDS = ("put", "clean", "heat", "cool", "look")
CHANGES = {
    "clean": ("clean", "sinkbasin 1"),
    "heat": ("hot", "microwave 1"),
    "cool": ("cool", "fridge 1"),
}
"""By verb, what it makes of a thing, and where."""
LAMP = "desk 1"
"""Where the desk lamp stands."""
NOTHING = "Nothing happens."
FOUND, CHANGED = 0.2, 0.3
"""Reward of taking the thing for the first time, and of changing it; the rest of 1 is earned at the end."""


@dataclass(frozen=True)
class Room:
    """What a seed makes: the places of a room, where its things are, and the task."""

    places: tuple[str, ...]
    things: dict[str, str]
    """By thing, its place."""
    kind: str
    thing: str
    target: str
    """Where the thing shall end; the lamp's place for `look`."""

    @property
    def task(self) -> str:
        """What shall be done, in words."""
        if self.kind == "look":
            return f"look at {self.thing} under desklamp 1"
        state = {"put": "", **{kind: f"{made} " for kind, (made, _) in CHANGES.items()}}[self.kind]
        return f"put {state}{self.thing} in {self.target}"


def make_room(seed: int, kind: str, *, num_places: int = 5, num_things: int = 4) -> Room:
    """Returns the room of a seed; the same on any machine.

    Raises ValueError for a kind that there is not.
    """
    if kind not in KINDS:
        raise ValueError(f"household: kind {kind!r} does not exist: use one of {', '.join(KINDS)}")
    dice = random.Random(f"{seed}/{kind}")
    needed = LAMP if kind == "look" else CHANGES[kind][1] if kind in CHANGES else ""
    places = [needed] if needed else []
    places += dice.sample([p for p in PLACES if p != needed], num_places - len(places))
    dice.shuffle(places)
    things = dice.sample(THINGS, num_things)
    where = {thing: dice.choice(places) for thing in things}
    thing = things[0]
    others = [place for place in places if place not in (where[thing], needed)]
    target = LAMP if kind == "look" else dice.choice(others)
    return Room(tuple(places), where, kind, thing, target)


@dataclass
class House:
    """A room in which one agent acts. `reset` and `step` return what a world returns."""

    seed: int
    kind: str
    num_places: int = 5
    num_things: int = 4
    at: str = "the middle of the room"
    holding: str = ""
    state: str = ""
    """What was made of the thing in hand: clean, hot or cool; empty: nothing."""
    opened: set[str] = field(default_factory=set)
    searched: set[str] = field(default_factory=set)
    earned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.room = make_room(self.seed, self.kind, num_places=self.num_places, num_things=self.num_things)
        self.where = dict(self.room.things)
        self.states: dict[str, str] = {}
        self.is_won = False

    def reset(self) -> dict[str, Any]:
        """Returns the first look around."""
        return self._shown(f"You are in {self.at}. You see {', '.join(self.room.places)}.", 0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Does what `action` says, and returns what is seen then; what means nothing changes nothing."""
        words = " ".join(action.lower().split())
        text = self._done(words)
        return self._shown(text, self._reward())

    def _done(self, words: str) -> str:
        verb, _, rest = words.partition(" ")
        if words == "look":
            return self._look()
        if words.startswith("go to ") and (place := words[6:]) in self.room.places and place != self.at:
            self.at = place
            return self._look()
        if verb == "open" and rest == self.at and rest in CLOSED and rest not in self.opened:
            self.opened.add(rest)
            return f"You open {rest}. {self._contents()}"
        if verb == "close" and rest == self.at and rest in self.opened:
            self.opened.remove(rest)
            return f"You close {rest}."
        thing, _, place = rest.partition({"take": " from ", "put": " in ", "use": " with "}.get(verb, " with "))
        return self._handled(verb, thing, place)

    def _handled(self, verb: str, thing: str, place: str) -> str:
        """What is done with a thing in the hand, or one that gets there."""
        if verb == "use" and thing == "desklamp 1" and self.at == LAMP and place == self.holding != "":
            self.is_won = self.room.kind == "look" and place == self.room.thing
            return f"You look at {place} under desklamp 1."
        if place != self.at:
            return NOTHING
        if verb == "take" and not self.holding and self.where.get(thing) == place and self._is_open(place):
            self.holding, self.state = thing, self.states.get(thing, "")
            del self.where[thing]
            return f"You take {thing} from {place}."
        if not self.holding or thing != self.holding:
            return NOTHING
        if verb == "put" and self._is_open(place):
            return self._put(thing, place)
        if verb in CHANGES and CHANGES[verb][1] == place:
            self.state = self.states[thing] = CHANGES[verb][0]
            return f"You {verb} {thing} with {place}."
        return NOTHING

    def _put(self, thing: str, place: str) -> str:
        self.where[thing], self.holding = place, ""
        room = self.room
        is_right = room.kind != "look" and (thing, place) == (room.thing, room.target)
        self.is_won = is_right and (room.kind == "put" or self.states.get(thing) == CHANGES[room.kind][0])
        self.state = ""
        return f"You put {thing} in {place}."

    def _look(self) -> str:
        if self.at not in self.room.places:
            return f"You are in {self.at}. You see {', '.join(self.room.places)}."
        return f"You are at {self.at}. {self._contents()}"

    def _contents(self) -> str:
        if not self._is_open(self.at):
            return "It is closed."
        self.searched.add(self.at)
        things = sorted(thing for thing, place in self.where.items() if place == self.at)
        lamp = ["desklamp 1"] if self.at == LAMP else []
        return f"You see {', '.join(things + lamp) or 'nothing'}."

    def _is_open(self, place: str) -> bool:
        return place in OPEN or place in self.opened

    def _reward(self) -> float:
        """What the last action earned: parts that are paid once, and sum to 1 where the task is done."""
        room, parts = self.room, {}
        if self.holding == room.thing:
            parts["found"] = FOUND
            if room.kind in CHANGES and self.state == CHANGES[room.kind][0]:
                parts["changed"] = CHANGED
        earned = sum(value for name, value in parts.items() if name not in self.earned)
        self.earned |= parts.keys()
        if self.is_won:
            earned += 1.0 - sum({"found": FOUND, "changed": CHANGED}[name] for name in self.earned)
        return earned

    def _shown(self, text: str, reward: float) -> dict[str, Any]:
        held = " ".join(filter(None, (self.state, self.holding))) or "nothing"
        unseen = [place for place in self.room.places if place not in self.searched]
        info = {"holding": held, "at": self.at, "unseen": ", ".join(unseen) or "nothing", "is_won": self.is_won}
        return {"text": text, "reward": reward, "is_done": self.is_won, "info": info, "anchor": self._anchor()}

    def _anchor(self) -> str:
        """Names the state of the room: where everything is, and what is open and known."""
        where, opened, searched = sorted(self.where.items()), sorted(self.opened), sorted(self.searched)
        parts = (self.at, self.holding, sorted(self.states.items()), where, opened, searched)
        return sha256(repr(parts).encode()).hexdigest()[:16]
