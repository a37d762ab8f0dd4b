"""ALFWorld's engine, in the environment that tests/worlds/alfworld/README.md says how to make, played in episodes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import one_group
import pytest
from one_group import saying

from pipelines.tasks.splits import settings_of
from serve_apps.authoring.environment import Environment
from serve_apps.config import EpisodeConfig
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import Script
from serve_apps.extensions.worlds.workers import WorldWorkers
from stores.types import EpisodeStatus, Task, Trace
from tests.worlds.alfworld.demonstrator import demonstrate
from tests.worlds.alfworld.games import KINDS
from tests.worlds.alfworld.tasks import generate
from tests.worlds.alfworld.workflow import PYTHON, ROOT, Alfworld

WITH_ALFWORLD = Path(os.environ.get("TROUPE_ALFWORLD_PYTHON", ROOT / PYTHON))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.anyio,
    pytest.mark.skipif(
        not WITH_ALFWORLD.exists(),
        reason=f"ALFWorld is not there: {PYTHON} or TROUPE_ALFWORLD_PYTHON, see tests/worlds/alfworld/README.md",
    ),
]
NOTHING = "Nothing happens."


class Careful(random.Random):
    """A demonstrator's chance that never strikes."""

    def random(self) -> float:
        return 1.0


def kind_of_world(name: str) -> Environment:
    return Environment(
        f"tests.worlds.alfworld.world:{name}", python=str(WITH_ALFWORLD), paths=(str(ROOT),), max_steps=60
    )


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], WorldWorkers]]:
    """Makes workers, one process each."""
    all_made: list[WorldWorkers] = []

    def make(name: str) -> WorldWorkers:
        all_made.append(WorldWorkers(kind_of_world(name)))
        return all_made[-1]

    yield make
    for workers in all_made:
        workers.end()


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return generate(seed=0, split="test", count=2 * len(KINDS))


def play(task: Task, says: Callable[[AgentCall], str], script: Script | None = None) -> Trace:
    """Runs an episode of the shipped workflow in which `says` answers for both agents."""
    limits = EpisodeConfig(turn_timeout_s=10, episode_timeout_s=240, max_attempts=1)
    flow = Alfworld(str(WITH_ALFWORLD))
    trace = one_group.play(flow, saying(says), task=task, limits=limits, script=script)
    assert trace.status is EpisodeStatus.OK, trace.error
    return trace


def acting(commands: Iterator[str]) -> Callable[[AgentCall], str]:
    """Both agents: the planner says anything, the actor the next command."""
    return lambda call: "<GOAL>done</GOAL>" if call.agent == "planner" else f"<ACT>{next(commands)}</ACT>"


def shown(trace: Trace) -> list[tuple[Any, ...]]:
    """What the world of an episode showed."""
    return [
        tuple(call.response[name] for name in ("text", "reward", "is_done", "anchor", "info"))
        for call in trace.tool_calls
    ]


async def walkthrough(workers: WorldWorkers, task: Task) -> list[str]:
    """The commands of ALFWorld's planner, who knows where everything is."""
    async with workers.session() as world:
        return list((await world.reset({**settings_of(task), "expert": "planner"}))["info"]["expert"])


@pytest.fixture(scope="module")
def plans(made: Callable[[str], WorldWorkers], tasks: list[Task]) -> list[list[str]]:
    workers = made("Generated")

    async def every() -> list[list[str]]:
        return [await walkthrough(workers, task) for task in tasks]

    return asyncio.run(every())


def test_the_planners_walkthrough_wins_every_kind_of_game(tasks: list[Task], plans: list[list[str]]) -> None:
    for task, plan in zip(tasks, plans, strict=True):
        trace = play(task, acting(iter(plan)))
        assert (trace.answer, trace.stop_reason) == ("done", "world_over"), task
        assert f"Your task is to: {task.prompt}." in trace.tool_calls[0].response["text"]
        assert [call.response["reward"] for call in trace.tool_calls] == [0.0] * len(plan) + [1.0]
        assert 4 <= len(plan) <= 12


def test_who_knows_the_game_and_looks_for_things_wins_through_the_prompts_alone(tasks: list[Task]) -> None:
    for task in tasks:
        trace = play(task, lambda call, task=task: demonstrate(call.agent, task, call.inputs, Careful()))
        assert trace.answer == "done", [call.request for call in trace.tool_calls]


def test_wrong_actions_do_not_win_and_change_nothing(tasks: list[Task], plans: list[list[str]]) -> None:
    wrong = [
        "sing",
        "",
        "take moon 1 from shelf 1",
        "go to the moon",
        "GO  TO",
        "x" * 5000,
        "\x00\n\x1b[2J",
        plans[0][-1],
    ]
    trace = play(tasks[0], acting(iter(wrong * 9)))
    assert (trace.answer, trace.stop_reason, len(trace.tool_calls)) == ("", "max_steps", 31)
    first, *steps = trace.tool_calls
    assert {(call.response["text"], call.response["anchor"]) for call in steps} == {(NOTHING, first.response["anchor"])}
    assert sum(call.response["reward"] for call in steps) == 0.0
    without_last = [*plans[0][:-1], *["inventory"] * 40]
    lost = play(tasks[0], acting(iter(without_last)))
    assert (lost.answer, lost.stop_reason) == ("", "max_steps")


def test_the_same_seed_is_the_same_game_in_another_process(
    made: Callable[[str], WorldWorkers], tasks: list[Task], plans: list[list[str]]
) -> None:
    async def played(workers: WorldWorkers, task: Task, plan: list[str]) -> list[Any]:
        async with workers.session() as world:
            return [await world.reset(settings_of(task)), *[await world.step(command) for command in plan]]

    async def both(task: Task, plan: list[str]) -> list[list[Any]]:
        return [await played(made("Generated"), task, plan) for _ in range(2)]

    first, again = asyncio.run(both(tasks[1], plans[1]))
    assert first == again and first[-1]["info"]["is_won"]
    other = asyncio.run(played(made("Generated"), tasks[6], []))
    assert other[0]["anchor"] != first[0]["anchor"] and other[0]["text"] != first[0]["text"]


def test_an_episode_that_is_played_again_shows_the_same_states(tasks: list[Task], plans: list[list[str]]) -> None:
    base = play(tasks[2], acting(iter(plans[2])))
    changed_at = [turn.turn_index for turn in base.turns if turn.agent == "actor"][-1]
    script = Script(kind="counterfactual", agent="actor", base=base, changed_at=changed_at)
    rest = iter(["sing", plans[2][-1]])
    variant = play(tasks[2], acting(rest), script)
    before, after = shown(base), shown(variant)
    assert after[: len(before) - 1] == before[:-1]
    assert after[len(before) - 1][0] == NOTHING and variant.answer == base.answer == "done"
    assert after[-1] == before[-1]
