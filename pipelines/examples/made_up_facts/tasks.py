"""tasks: seed, split, count -> questions about a made-up world of people, towns and countries, and the documents of it.

"Mira Holt lives in Tarn and works as baker."   Where does Mira Holt live?               one hop     Tarn
"Tarn lies in Velland."                         In which country does Mira Holt live?    two hops    Velland
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u")
ENDS = ("l", "n", "r", "s", "m", "th")
JOBS = ("baker", "painter", "miller", "teacher", "sailor", "smith", "weaver", "doctor")
SHARES = {"test": 0.15, "gate": 0.1, "sentinel": 0.05}
"""Of all people; the others are for training. A person's questions are all in one split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The people, towns and countries of a made-up world."""

    people: tuple[tuple[str, str, str], ...]
    """(name, town, job)."""
    towns: dict[str, str]
    """Country by town."""
    currencies: dict[str, str]
    """By country."""


@lru_cache(maxsize=4)
def build_world(world_seed: int = 0, num_people: int = 2000, num_towns: int = 120, num_countries: int = 12) -> World:
    """Returns a world, the same for the same arguments on any machine."""
    rng = random.Random(f"world/{world_seed}")
    countries = _names(rng, num_countries, 2)
    taken = set(countries)
    towns = dict.fromkeys(_names(rng, num_towns, 2, taken), "")
    taken |= towns.keys()
    currencies = dict(zip(countries, _names(rng, num_countries, 2, taken), strict=True))
    for town in towns:
        towns[town] = rng.choice(countries)
    firsts, lasts = _names(rng, 60, 2, taken), _names(rng, 60, 1, taken)
    pairs = [f"{first} {last}" for first in firsts for last in lasts]
    if num_people > len(pairs):
        raise ValueError(f"made_up_facts: num_people = {num_people}, there are names for {len(pairs)}")
    names = rng.sample(pairs, num_people)
    people = tuple((name, rng.choice(list(towns)), rng.choice(JOBS)) for name in names)
    return World(people=people, towns=towns, currencies=currencies)


def documents(**world: Any) -> Iterator[dict[str, str]]:
    """Yields the corpus: one document per person, town and country, as `troupe corpus` reads them."""
    built = build_world(**world)
    for i, (name, town, job) in enumerate(built.people):
        yield {"id": f"p{i}", "title": name, "text": f"{name} lives in {town} and works as {job}."}
    for i, (town, country) in enumerate(built.towns.items()):
        yield {"id": f"t{i}", "title": town, "text": f"{town} lies in {country}."}
    for i, (country, currency) in enumerate(built.currencies.items()):
        yield {"id": f"c{i}", "title": country, "text": f"{country} pays in {currency}."}


def generate(seed: int, split: str, count: int, hops: str = "both", **world: Any) -> list[Task]:
    """Returns `count` questions of a split, the same for the same arguments.

    Args:
        seed: which questions, and in which order.
        split: train, gate, test or sentinel; people do not occur in two of them.
        count: how many.
        hops: one, two or both.
        world: see `build_world`.

    Raises ValueError where the split holds fewer.
    """
    if hops not in ("one", "two", "both"):
        raise ValueError(f"made_up_facts: hops = {hops!r}: one, two or both")
    built = build_world(**world)
    tasks = []
    for name, town, job in built.people:
        if split_of(name) != split:
            continue
        if hops != "two":
            tasks.append(_task(f"Where does {name} live?", town, "one_hop", name))
            tasks.append(_task(f"What is the job of {name}?", job, "one_hop", name))
        if hops != "one":
            tasks.append(_task(f"In which country does {name} live?", built.towns[town], "two_hop", name))
    if count > len(tasks):
        raise ValueError(
            f"made_up_facts: split {split!r} holds {len(tasks)} questions, {count} were asked for: lower `count`, or "
            "raise `num_people`"
        )
    return random.Random(f"{seed}/{split}").sample(tasks, count)


def split_of(name: str) -> str:
    """Returns the split of a person, which does not depend on seed or machine."""
    return part_of(name, SHARES, rest="train")


def _task(question: str, answer: str, source: str, name: str) -> Task:
    return Task(
        task_id=sha256(question.encode()).hexdigest()[:16],
        prompt=question,
        answers=(answer,),
        source=source,
        metadata={FAMILY: name},
    )


def _names(rng: random.Random, count: int, num_syllables: int, taken: set[str] | None = None) -> list[str]:
    """Returns names like Tarvel, which a tokenizer splits into few tokens."""
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(num_syllables)]
        name = ("".join(syllables) + rng.choice(ENDS)).capitalize()
        if name not in (taken or ()):
            names[name] = None
    return list(names)
