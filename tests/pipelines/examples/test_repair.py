"""The repositories to repair: one fault, one broken test, and no repository that two splits share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipelines.examples.repair.library import LIBRARY
from pipelines.examples.repair.tasks import SHARES, demonstrate, generate, make_repository, mutants, split_of
from pipelines.examples.repair.workflow import Repair
from pipelines.examples.repair.world import Repair as World
from pipelines.tasks.splits import settings_of
from stores.types import Task


class Careful(random.Random):
    """A demonstrator's chance that never strikes."""

    def random(self) -> float:
        return 1.0


def play(task: Task, dice: random.Random, *, rounds: int = 2) -> dict[str, Any]:
    """What the world shows at the end."""
    world = World(**settings_of(task))
    world.reset()
    for _ in range(rounds):
        path, function = demonstrate("locator", task, {}, dice)[6:-11].split("</FILE><FUNCTION>")
        lines = world.step(f"read {path} {function}")["text"]
        number, text = demonstrate("coder", task, {"lines": lines}, dice)[6:-6].split("</LINE><NEW>")
        world.step(f"edit {path} {number}\n{text}")
        test_report = world.step("test")["text"]
        if demonstrate("verifier", task, {"test_report": test_report}, dice) == "<VERDICT>submit</VERDICT>":
            break
    return world.step("submit")


@pytest.mark.fast
def test_a_repository_has_one_fault_that_its_issue_shows() -> None:
    for task in generate(seed=0, split="train", count=50):
        made = make_repository(**settings_of(task))
        wrong = [path for path in made.repaired if made.files[path] != made.repaired[path]]
        assert wrong == [made.path]
        lines = zip(made.files[made.path].splitlines(), made.repaired[made.path].splitlines(), strict=True)
        assert sum(line != other for line, other in lines) == 1
        call, _, value = task.prompt.rpartition(", not ")
        call, _, wrong_value = call.rpartition(" gives ")
        for files, expected in ((made.files, wrong_value), (made.repaired, value)):
            scope: dict[str, Any] = {}
            exec(files[made.path], scope)
            assert repr(eval(call, scope)) == expected
        assert len(made.fail_to_pass) == 1 and len(made.pass_to_pass) == 8


@pytest.mark.fast
def test_every_function_can_have_a_fault() -> None:
    assert all(list(mutants(function)) for functions in LIBRARY.values() for function in functions)


@pytest.mark.fast
def test_splits_share_no_repository() -> None:
    seen: dict[str, str] = {}
    for split in SHARES:
        for task in generate(seed=1, split=split, count=40):
            made = make_repository(**settings_of(task))
            assert split_of(made) == split
            assert seen.setdefault(repr(made.files), split) == split
            assert seen.setdefault(f"{made.path}: {made.fault}", split) == split, (
                "who knows the fault needs nothing else"
            )
    with pytest.raises(ValueError, match="rounds = 0: at least one change is needed"):
        Repair(rounds=0)
    assert Repair(rounds=9).environments["repo"].max_steps == 28, "to read, edit and test nine times, and to submit"


@pytest.mark.nightly
@pytest.mark.needs_program("bwrap")
def test_who_makes_no_mistake_repairs_it_and_a_careless_player_often_does_not() -> None:
    tasks = generate(seed=0, split="gate", count=8)
    assert all(play(task, Careful())["reward"] == 1.0 for task in tasks[:3])
    repaired = [play(task, random.Random(number), rounds=1)["reward"] for number, task in enumerate(tasks)]
    assert 0.1 < sum(repaired) / len(repaired) < 0.9
