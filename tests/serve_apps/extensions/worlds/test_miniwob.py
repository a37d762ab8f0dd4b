"""Pages of MiniWoB++ in a real browser, in an environment of their own, played in episodes. Needs a package index."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import one_group
import psutil
import pytest
from one_group import saying

from pipelines.tasks.splits import settings_of
from serve_apps.authoring.agent import ToolFault
from serve_apps.authoring.environment import Environment
from serve_apps.config import EpisodeConfig
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import Script
from serve_apps.extensions.worlds.workers import SCRIPT, WorldWorkers, workers_of
from stores.types import Cause, EpisodeStatus, Task, Trace
from tests.venvs import make_venv
from tests.worlds.miniwob.demonstrator import demonstrate
from tests.worlds.miniwob.tasks import PAGES, generate
from tests.worlds.miniwob.workflow import ROOT, Browsing

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.anyio,
    pytest.mark.needs_program("chromium"),
    pytest.mark.needs_program("chromedriver"),
]
NOTHING = "\nNothing happens."
FACTORY = "tests.worlds.miniwob.world:Page"


class Careful(random.Random):
    """A demonstrator's chance that never strikes."""

    def random(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_venv("miniwob", tmp_path_factory.mktemp("miniwob"))


@pytest.fixture(scope="module")
def flow(python: str) -> Iterator[Browsing]:
    """The shipped workflow. At the end nothing of its browser is left."""
    flow = Browsing(python)
    yield flow
    began = started_by(worker_of(flow))
    workers_of(flow.environments["page"]).end()
    assert_gone(began)


@pytest.fixture
def workers(python: str) -> Iterator[WorldWorkers]:
    made = WorldWorkers(Environment(FACTORY, python=python, paths=(str(ROOT),), is_isolated=True))
    yield made
    made.end()


def worker_of(flow: Browsing) -> int:
    """The process that holds the workflow's pages."""
    pid = workers_of(flow.environments["page"]).workers[0].pid
    assert pid is not None
    return pid


def started_by(pid: int) -> list[psutil.Process]:
    """All that a worker has started: driver, browser and the guard of both."""
    started = psutil.Process(pid).children(recursive=True)
    assert {"chromedriver", "chromium", "sh"} <= {process.name() for process in started}
    return started


def folder_of(started: list[psutil.Process]) -> Path:
    """Where the browser keeps its files: the guard's last word."""
    (guard,) = [process for process in started if process.name() == "sh"]
    return Path(guard.cmdline()[-1])


def assert_gone(started: list[psutil.Process], *, folder: Path | None = None) -> None:
    _, left = psutil.wait_procs(started, timeout=15)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    assert folder is None or not folder.exists()


def play(
    flow: Browsing,
    task: Task,
    says: Callable[[AgentCall], str],
    *,
    script: Script | None = None,
    max_attempts: int = 1,
) -> Trace:
    """Runs an episode of the workflow in which `says` answers for both agents."""
    limits = EpisodeConfig(turn_timeout_s=60, episode_timeout_s=240, max_attempts=max_attempts)
    return one_group.play(flow, saying(says), task=task, limits=limits, script=script)


def knows(task: Task) -> Callable[[AgentCall], str]:
    """Both agents do what is right."""
    return lambda call: demonstrate(call.agent, task, call.inputs, Careful())


def acting(actions: list[str]) -> Callable[[AgentCall], str]:
    """The reader names nothing, the actor does one thing after the other."""
    left = iter(actions)
    return lambda call: "<ELEMENT>0</ELEMENT>" if call.agent == "reader" else f"<ACT>{next(left)}</ACT>"


def test_twenty_episodes_on_four_kinds_of_pages_are_won_by_who_knows_how(flow: Browsing) -> None:
    tasks = generate(seed=0, split="train", count=20)
    traces = [play(flow, task, knows(task)) for task in tasks]
    assert Counter(trace.task.source for trace in traces) == dict.fromkeys(PAGES, 5)
    assert Counter((t.status, t.stop_reason, t.answer) for t in traces) == {(EpisodeStatus.OK, "world_over", "1"): 20}
    for trace in traces:
        first, *steps = trace.tool_calls
        assert first.request == {"world": 0, "reset": settings_of(trace.task)}
        assert [call.response["reward"] for call in steps] == [0.0] * (len(steps) - 1) + [1.0]
        assert steps[-1].response["info"] == {"page": trace.task.source, "raw_reward": 1.0, "is_won": True}
        reader, actor = trace.turns[0], trace.turns[1]
        assert actor.parents == (first.call_index, reader.turn_index) and steps[0].parents == (actor.turn_index,)


def test_what_is_impossible_is_answered_and_changes_nothing(flow: Browsing) -> None:
    wrong = [
        "sing",
        "",
        "click",
        "click 999",
        "click -1",
        "type 6 into a button",
        "type 5 \ue007",
        "x" * 5000,
        "click ６６",
        "type 5 " + "a" * 257,
    ]
    task = Task(task_id="t", prompt="p", answers=(), metadata={"page": "enter-text", "seed": 1})
    trace = play(flow, task, acting(wrong))
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "0", "max_steps"), trace.error
    first, *steps = trace.tool_calls
    assert len(steps) == len(wrong)
    assert {call.response["text"] for call in steps} == {first.response["text"] + NOTHING}
    assert {call.response["anchor"] for call in steps} == {first.response["anchor"]}


def test_an_episode_that_is_played_again_shows_the_same_page(flow: Browsing) -> None:
    (task,) = generate(seed=5, split="train", count=1, pages=["click-checkboxes"])
    base = play(flow, task, knows(task))
    changed_at = [turn.turn_index for turn in base.turns if turn.agent == "actor"][-1]
    script = Script(kind="counterfactual", agent="actor", base=base, changed_at=changed_at)
    answers = iter(["<ACT>sing</ACT>"])
    other = play(flow, task, lambda call: next(answers, None) or knows(task)(call), script=script)
    assert (other.status, other.answer) == (EpisodeStatus.OK, "1"), other.error
    before, after = ([call.response for call in trace.tool_calls] for trace in (base, other))
    assert after[: len(before) - 1] == before[:-1] and after[-1] == before[-1]
    assert after[len(before) - 1]["text"] == before[-2]["text"] + NOTHING


@pytest.mark.parametrize("what", ["driver", "browser", "renderer"])
def test_a_killed_browser_is_a_fault_of_the_infrastructure_and_the_next_attempt_has_a_new_one(
    what: str, flow: Browsing
) -> None:
    (task,) = generate(seed=0, split="train", count=1)
    play(flow, task, knows(task))
    kills: list[bool] = []

    def says(call: AgentCall) -> str:
        if call.agent == "actor" and kills:
            kills.pop()
            part_of(started_by(worker_of(flow)), what).kill()
        return knows(task)(call)

    began, worker = started_by(worker_of(flow)), worker_of(flow)
    kills.append(True)
    trace = play(flow, task, says)
    assert (trace.status, trace.cause) == (EpisodeStatus.TOOL_ERROR, Cause.INFRASTRUCTURE), trace.error
    assert "BrowserFailed: the browser does not answer: " in trace.error and "\n" not in trace.error
    assert_gone(began)
    play(flow, task, knows(task))
    kills.append(True)
    again = play(flow, task, says, max_attempts=2)
    assert (again.status, again.attempt, again.answer) == (EpisodeStatus.OK, 2, "1"), again.error
    assert worker_of(flow) == worker, "the worker lives on"


def part_of(started: list[psutil.Process], what: str) -> psutil.Process:
    driver = next(process for process in started if process.name() == "chromedriver")
    found = {
        "driver": [driver],
        "browser": [process for process in started if process.ppid() == driver.pid],
        "renderer": [process for process in started if "--type=renderer" in process.cmdline()],
    }
    return found[what][-1]


async def test_nothing_is_left_of_a_browser_whatever_becomes_of_its_worker(workers: WorldWorkers) -> None:
    (worker,) = workers.workers
    settings = {"page": "click-test-2", "seed": 0}
    async with workers.session() as world:
        await world.reset(settings)
        started = started_by(worker.pid or 0)
        folder = folder_of(started)
        assert folder.is_dir()
        psutil.Process(worker.pid).kill()
        assert_gone(started, folder=folder)
        with pytest.raises(ToolFault, match="ended in step"):
            await world.step("click 4")
    async with workers.session() as world:
        await world.reset(settings)
        started = started_by(worker.pid or 0)
        folder = folder_of(started)
    workers.end()
    assert_gone(started, folder=folder)


def test_nothing_is_left_of_a_browser_when_its_owner_dies(python: str) -> None:
    command = [python, str(SCRIPT), FACTORY, str(ROOT)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdin is not None and worker.stdout is not None
    assert json.loads(worker.stdout.readline()) == {"ready": True}
    request = {"world": 0, "verb": "reset", "argument": {"page": "click-test-2", "seed": 0}}
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()
    assert "answer" in json.loads(worker.stdout.readline())
    started = started_by(worker.pid)
    folder = folder_of(started)
    worker.stdin.close()
    assert_gone(started, folder=folder)
    worker.wait(timeout=10)
    worker.stdout.close()
