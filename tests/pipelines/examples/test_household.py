"""The household game: its words, its rewards, and rooms that no two splits share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipelines.examples.household.tasks import SHARES, demonstrate, generate, split_of
from pipelines.examples.household.world import KINDS, NOTHING, House, make_room
from pipelines.tasks.splits import settings_of
from stores.types import Task

pytestmark = pytest.mark.fast


class Careful(random.Random):
    """A demonstrator's chance that never strikes."""

    def random(self) -> float:
        return 1.0


def play(task: Task, dice: random.Random, *, max_steps: int = 14) -> tuple[House, list[dict[str, Any]]]:
    """Plays planner and actor, as the workflow asks them."""
    house = House(**settings_of(task))
    seen, goal, holding = [house.reset()], "", None
    while not seen[-1]["is_done"] and len(seen) <= max_steps:
        info = seen[-1]["info"]
        if info["holding"] != holding:
            holding = info["holding"]
            goal = demonstrate("planner", task, {"task": task.prompt, "holding": holding}, dice)[6:-7]
        inputs = {"goal": goal, "at": info["at"], "unseen": info["unseen"], "see": seen[-1]["text"]}
        seen.append(house.step(demonstrate("actor", task, inputs, dice)[5:-6]))
    return house, seen


@pytest.mark.parametrize("kind", KINDS)
def test_who_makes_no_mistake_does_every_task_and_earns_one(kind: str) -> None:
    tasks = generate(seed=0, split="train", count=60, kinds=[kind])
    played = [play(task, Careful()) for task in tasks]
    assert all(house.is_won for house, _ in played)
    assert all(sum(shown["reward"] for shown in seen) == pytest.approx(1.0) for _, seen in played)
    assert 4 < sum(len(seen) - 1 for _, seen in played) / len(played) < 12


def test_a_careless_player_has_room_to_improve() -> None:
    tasks = generate(seed=0, split="train", count=200)
    won = [play(task, random.Random(n))[0].is_won for n, task in enumerate(tasks)]
    assert 0.4 < sum(won) / len(won) < 0.8


def test_what_means_nothing_changes_nothing() -> None:
    house = House(seed=1, kind="heat")
    before = house.reset()
    for action in (
        "",
        "sing",
        "take",
        "take apple from",
        "put apple in table 1",
        "go to the moon",
        "open fridge 1",
        "\x00" * 99,
    ):
        shown = house.step(action)
        assert shown == {**before, "text": NOTHING}, action


def test_a_thing_must_be_hot_when_it_is_put_and_not_only_once_held() -> None:
    room = make_room(5, "heat")
    house = House(seed=5, kind="heat")
    home, target = room.things[room.thing], room.target
    actions = [f"go to {home}", f"open {home}", f"take {room.thing} from {home}", f"go to {target}", f"open {target}"]
    for action in actions:
        house.step(action)
    cold = house.step(f"put {room.thing} in {target}")
    assert cold["text"].startswith("You put") and not cold["is_done"] and cold["reward"] == 0.0
    more = [
        f"take {room.thing} from {target}",
        "go to microwave 1",
        f"heat {room.thing} with microwave 1",
        f"go to {target}",
    ]
    rewards = [house.step(action)["reward"] for action in more]
    done = house.step(f"put {room.thing} in {target}")
    assert rewards == [0.0, 0.0, 0.3, 0.0] and done["is_done"] and done["reward"] == pytest.approx(0.5)


def test_the_anchor_is_the_state_whatever_way_led_there() -> None:
    one, other = House(seed=3, kind="put"), House(seed=3, kind="put")
    a, b = one.room.places[:2]
    one.reset()
    other.reset()
    direct = [one.step(f"go to {place}") for place in (a, b)]
    around = [other.step(action) for action in (f"go to {a}", "sing", f"go to {b}")]
    assert direct[-1]["anchor"] == around[-1]["anchor"] != direct[0]["anchor"]
    assert around[0]["anchor"] == around[1]["anchor"]


def test_no_room_of_one_split_has_the_places_of_a_room_of_another() -> None:
    places = {
        split: {frozenset(make_room(**settings_of(task)).places) for task in generate(seed=1, split=split, count=80)}
        for split in SHARES
    }
    for split, rooms in places.items():
        assert all(rooms.isdisjoint(places[other]) for other in places if other != split)
    assert {split_of(make_room(**settings_of(t))) for t in generate(seed=2, split="test", count=20)} == {"test"}
    assert generate(seed=1, split="train", count=5) == generate(seed=1, split="train", count=5)


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"household: kinds = \['fly'\]"):
        generate(seed=0, split="train", count=1, kinds=["fly"])
    with pytest.raises(ValueError, match="household: kind 'fly' does not exist: use one of put, clean"):
        make_room(0, "fly")
