"""Games of ALFWorld by seed: what a task asks for is never done at once, and no two splits share a room."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipelines.config.run_config import load_config
from pipelines.tasks.splits import settings_of
from tests.worlds.alfworld.demonstrator import demonstrate
from tests.worlds.alfworld.games import HOLDS, KINDS, STATIONS, make_room, problem, type_of
from tests.worlds.alfworld.tasks import SHARES, generate, split_of
from tests.worlds.alfworld.workflow import ROOT

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", KINDS)
def test_a_room_has_what_its_task_needs_and_the_task_is_not_done_yet(kind: str) -> None:
    for seed in range(300):
        room = make_room(seed, kind)
        types = set(map(type_of, room.places))
        assert all(place in room.places and thing in HOLDS[type_of(place)] for thing, place in room.things.items())
        if kind == "look":
            assert "desk" in types and room.target == ""
        else:
            assert room.target in types and room.thing in HOLDS[room.target]
            assert room.target not in (type_of(room.things[room.thing]), STATIONS.get(kind))
        assert STATIONS.get(kind, room.target or "desk") in types
        assert room == make_room(seed, kind)


def test_every_name_of_a_problem_is_declared_once() -> None:
    room = make_room(4, "clean")
    text = problem(room, "(:goal ()))")
    objects = text.partition("(:objects\n")[2].partition("\n)\n")[0].split()
    declared = [word for word, dash in zip(objects, [*objects[1:], ""], strict=True) if dash == "-"]
    assert not [name for name, number in Counter(declared).items() if number > 1]
    used = {word.strip("()") for line in text.partition("(:init\n")[2].splitlines() for word in line.split()[1:]}
    assert used - {"(total-cost)", "total-cost", "0", ""} <= {*declared, *objects}
    assert "sink_bar_0_bar_sinkbasin" in declared


def test_no_room_of_one_split_is_in_another() -> None:
    tasks = {split: generate(seed=1, split=split, count=80) for split in SHARES}
    rooms = {
        split: {repr((r.places, sorted(r.things.items()))) for r in (make_room(**settings_of(t)) for t in own)}
        for split, own in tasks.items()
    }
    for split, own in rooms.items():
        assert all(own.isdisjoint(rooms[other]) for other in rooms if other != split)
    assert Counter(task.source for task in tasks["train"]) == dict.fromkeys(KINDS, 16)
    assert {split_of(make_room(**settings_of(t))) for t in generate(seed=2, split="test", count=20)} == {"test"}
    assert generate(seed=1, split="train", count=80) == tasks["train"]


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"alfworld: split 'dev' does not exist: use one of train, gate, test, sentinel"
    ):
        generate(seed=0, split="dev", count=1)
    with pytest.raises(ValueError, match=r"alfworld: kinds = \['fly'\]"):
        generate(seed=0, split="train", count=1, kinds=["fly"])
    with pytest.raises(ValueError, match="alfworld: kind 'fly' does not exist: use one of put, clean"):
        make_room(0, "fly")


def test_the_demonstrator_opens_what_is_closed_and_says_nothing_that_is_impossible() -> None:
    (task,) = generate(seed=0, split="train", count=1, kinds=["heat"])
    thing = make_room(**settings_of(task)).thing
    inputs = {"goal": f"find {thing}", "unseen": "fridge 1, microwave 1", "possible": "go to fridge 1, open fridge 1"}
    acts = {demonstrate("actor", task, inputs, random.Random(n)) for n in range(50)}
    assert acts == {"<ACT>open fridge 1</ACT>", "<ACT>go to fridge 1</ACT>"}, "the second is a careless one"
    goals = Counter(demonstrate("planner", task, {"holding": "nothing"}, random.Random(n)) for n in range(50))
    assert goals.most_common(1)[0][0] == f"<GOAL>find {thing}</GOAL>" and len(goals) == 2


def test_its_run_config_is_valid() -> None:
    config = load_config(ROOT / "tests" / "worlds" / "alfworld" / "run.yaml")
    assert config.workflow.path == "tests.worlds.alfworld.workflow:Alfworld"
