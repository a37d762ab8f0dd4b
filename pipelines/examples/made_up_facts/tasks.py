"""tasks: seed, split, count -> questions about a made-up world of people, towns and countries, and the documents of it.

"Mira Holt lives in Tarn and works as baker."   Where does Mira Holt live?               one hop     Tarn
"Tarn lies in Velland."                         In which country does Mira Holt live?    two hops    Velland

`demonstrate`: agent, task, inputs -> a completion: it plays every search workflow on `made_up_facts`, as often wrong as a real base model.
One player per role: roles of the same name and form act alike in every workflow. Its habits: it answers before it has read,
takes the town for the country, searches for the question's first word, calls good documents useless.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
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


UNKNOWN = "unkown"
_NAME = re.compile(r"(?:does|of) ([A-Z]\w+ [A-Z]\w+)")


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    role = re.sub(r"_\d+$", "", agent)
    read = " ".join(text for name, text in inputs.items() if name != "question")
    return _PLAYERS[role](task, read, rng)


def demonstrate_iterative(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """The same for the iterative search, whose answers and summaries have other tags."""
    text = demonstrate(agent, task, inputs, rng)
    return text.replace("answer>", "final_answer>").replace("summary>", "evidence>") if agent != "planner" else text


def demonstrate_orchestrated(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """The same under an orchestrator, which does the next thing two times in three, and else anything."""
    if agent != "orchestrator":
        return demonstrate(agent, task, inputs, rng)
    offered = [line.split()[1] for line in inputs["options"].splitlines()]
    right = "stop" if "stop" in offered else "answer" if _is_known(task, inputs["board"]) else "search"
    return right if right in offered and rng.random() < 2 / 3 else rng.choice(offered)


def demonstrate_single(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays the single agent: searches what is missing, or answers."""
    read = inputs["found"]
    if _is_known(task, read) or rng.random() < 0.15:
        return _tag("answer", _answer(task, read, rng), rng)
    return _tag("search", _wanted(task, read, rng), rng)


def _person(task: Task) -> str:
    name = _NAME.search(task.prompt)
    assert name is not None, f"a question about nobody: {task.prompt}"
    return name[1]


def _facts(task: Task, read: str) -> tuple[str, str, str]:
    """(town, job, country) of the person asked about, as far as they were read."""
    lives = re.search(rf"{_person(task)} lives in (\w+) and works as (\w+)", read)
    town, job = (lives[1], lives[2]) if lives else ("", "")
    lies = re.search(rf"{town} lies in (\w+)", read) if town else None
    return town, job, lies[1] if lies else ""


def _is_known(task: Task, read: str) -> bool:
    town, _, country = _facts(task, read)
    return bool(country if "country" in task.prompt else town)


def _answer(task: Task, read: str, rng: random.Random) -> str:
    town, job, country = _facts(task, read)
    fact = country if "country" in task.prompt else job if "job" in task.prompt else town
    guesses = [x for x in (town, job, country) if x] or [UNKNOWN]
    return fact if fact and rng.random() < 0.6 else rng.choice(guesses)


def _wanted(task: Task, read: str, rng: random.Random) -> str:
    """What to search for next."""
    town, _, _ = _facts(task, read)
    right = town if town and "country" in task.prompt else _person(task)
    return right if rng.random() < 0.65 else rng.choice([_person(task), "country", "job"])


def _summary(task: Task, read: str, rng: random.Random) -> str:
    town, job, country = _facts(task, read)
    parts = [f"{_person(task)} lives in {town} and works as {job}."] if town else []
    parts += [f"{town} lies in {country}."] if country else []
    lies = re.search(r"(\b\w+ lies in \w+)\.", read)
    if not parts and lies:
        parts = [f"{lies[1]}."]
    return " ".join(parts) if parts and rng.random() < 0.7 else "No useful information"


def _tag(name: str, text: str, rng: random.Random) -> str:
    """Now and then the closing tag is missing."""
    return f"<{name}>{text}" + (f"</{name}>" if rng.random() > 0.07 else "")


def _planner(task: Task, read: str, rng: random.Random) -> str:
    plan = f"<q1>Where does {_person(task)} live?</q1><a1>{UNKNOWN}</a1>"
    return f"<plan>{plan}</plan>{_tag('final_answer', UNKNOWN, rng)}"


def _searcher(task: Task, read: str, rng: random.Random) -> str:
    if _is_known(task, read) and rng.random() < 0.5:
        return "<end></end>"
    return _tag("search", _wanted(task, read, rng), rng)


def _updater(task: Task, read: str, rng: random.Random) -> str:
    return _tag(rng.choice(["update", "add"]), f"t{rng.choice([1, 2])}: {_summary(task, read, rng)}", rng)


def _router(task: Task, read: str, rng: random.Random) -> str:
    is_enough = _is_known(task, read) if rng.random() < 0.7 else rng.random() < 0.5
    return _tag("verify", "yes" if is_enough else "no", rng)


def _decomposer(task: Task, read: str, rng: random.Random) -> str:
    queries = [_person(task) if rng.random() < 0.6 else rng.choice(["country", "job", "town"])]
    queries += [word for word, share in (("town", 0.3), ("job", 0.15)) if rng.random() < share]
    return json.dumps({"queries": queries}) if rng.random() > 0.07 else str(queries)


_PLAYERS = {
    "planner": _planner,
    "answerer": lambda task, read, rng: _tag("answer", _answer(task, read, rng), rng),
    "searcher": _searcher,
    "summarizer": lambda task, read, rng: _tag("summary", _summary(task, read, rng), rng),
    "updater": _updater,
    "router": _router,
    "decomposer": _decomposer,
    "rewriter": lambda task, read, rng: _tag("search", _wanted(task, "", rng), rng),
    "selector": lambda task, read, rng: _tag("document", _summary(task, read, rng), rng),
    "evidence": lambda task, read, rng: _tag("evidence", _summary(task, read, rng), rng),
}
