"""Workers of worlds: real processes, and what becomes of those that hang, die, grow or talk nonsense."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import until, wait_until

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.workers import WorldWorkers
from stores.types import Cause

pytestmark = [pytest.mark.test, pytest.mark.anyio]
HERE = str(Path(__file__).parent)


@pytest.fixture
def made() -> Iterator[list[WorldWorkers]]:
    made: list[WorldWorkers] = []
    yield made
    for workers in made:
        workers.end()


def workers_of(made: list[WorldWorkers], name: str, **settings: Any) -> WorldWorkers:
    made.append(WorldWorkers(Environment(f"odd_worlds:{name}", paths=(HERE,), **settings)))
    return made[-1]


async def test_many_worlds_live_in_one_worker_and_each_remembers_its_own(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Corridor")
    async with workers.session() as one, workers.session() as other:
        await one.reset({"length": 2})
        await other.reset({"length": 5})
        assert (await one.step("walk"))["text"] == "You have walked 1 of 2."
        assert (await other.step("walk"))["text"] == "You have walked 1 of 5."
        assert (await one.step("walk"))["is_done"]
    (worker,) = workers.workers
    assert worker.life == 1 and not worker.num_worlds


async def test_a_worker_has_an_interpreter_of_its_own(made: list[WorldWorkers], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "elsewhere.py").write_text(
        textwrap.dedent("""
        import importlib.util, sys
        class World:
            def reset(self):
                return {"text": sys.prefix, "info": {"has_torch": importlib.util.find_spec("torch") is not None}}
        """)
    )
    kind = Environment("elsewhere:World", python=str(tmp_path / "venv" / "bin" / "python"), paths=(str(tmp_path),))
    made.append(WorldWorkers(kind))
    async with made[0].session() as world:
        seen = await world.reset({})
    assert seen == {"text": str(tmp_path / "venv"), "info": {"has_torch": False}}


async def test_a_world_that_hangs_is_given_up_and_the_next_one_gets_a_fresh_worker(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Hanging", step_timeout_s=0.5)
    began = time.monotonic()
    async with workers.session() as world, workers.session() as beside:
        await world.reset({})
        await beside.reset({})
        with pytest.raises(ToolFault, match=r"gave no answer to step within 0\.5 s"):
            await world.step("hang")
        with pytest.raises(ToolFault, match="was lost with its worker, in the step of another world"):
            await beside.step("look")
    async with workers.session() as world:
        await world.reset({})
        assert (await world.step("look"))["text"] == "You look."
    assert workers.workers[0].life == 2 and time.monotonic() - began < 10


async def test_a_world_that_hangs_may_be_its_policys_fault_and_one_that_cannot_work_is_not(
    made: list[WorldWorkers],
) -> None:
    workers = workers_of(made, "Hanging", step_timeout_s=0.5, timeout_cause=Cause.POLICY)
    async with workers.session() as world, workers.session() as beside:
        await world.reset({})
        await beside.reset({})
        with pytest.raises(ToolRaised, match=r"gave no answer to step within 0\.5 s"):
            await world.step("hang")
        with pytest.raises(ToolFault, match="was lost with its worker, in the step of another world"):
            await beside.step("look")
    workers = workers_of(made, "Raising")
    async with workers.session() as world:
        await world.reset({"place": "step"})
        with pytest.raises(ToolFault, match="Unavailable: no sandbox starts"):
            await world.step("work")
        with pytest.raises(ToolRaised, match="KeyError: 'jump'"):
            await world.step("jump")


async def test_a_worker_that_dies_says_its_last_words(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Dying")
    async with workers.session() as world:
        await world.reset({})
        await world.step("a")
        await world.step("b")
        with pytest.raises(ToolFault, match=r"(?s)ended in step; it said: .*so this is the end"):
            await world.step("c")


async def test_a_worker_that_grows_beyond_its_limit_is_ended(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Growing", memory_mib=300)
    async with workers.session() as world:
        await world.reset({})
        with pytest.raises(ToolFault, match=r"took \d+ MiB of memory, more than memory_mib = 300"):
            for _ in range(40):
                await world.step("grow")


async def test_what_a_world_raises_in_a_step_is_told_and_others_live_on(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Raising")
    async with workers.session() as world, workers.session() as beside:
        await world.reset({"place": "step"})
        await beside.reset({"place": "step"})
        with pytest.raises(ToolRaised, match="KeyError: 'jump'"):
            await world.step("jump")
        with pytest.raises(ToolRaised, match="KeyError: 'run'"):
            await beside.step("run")
    assert workers.workers[0].life == 1


@pytest.mark.parametrize("place", ["init", "reset"])
async def test_a_world_that_does_not_begin_is_its_authors_fault(made: list[WorldWorkers], place: str) -> None:
    workers = workers_of(made, "Raising")
    async with workers.session() as world:
        with pytest.raises(AuthorError, match=rf"does not begin with .*{place}.*: ValueError: no such house"):
            await world.reset({"place": place})
        with pytest.raises(AuthorError, match=r"does not begin with .*'color'.*TypeError"):
            await world.reset({"color": "red"})


async def test_a_class_that_cannot_be_imported_is_named_with_the_interpreter(made: list[WorldWorkers]) -> None:
    workers = WorldWorkers(Environment("no_such_worlds:House"))
    made.append(workers)
    async with workers.session() as world:
        with pytest.raises(AuthorError, match=r"no_such_worlds:House cannot be imported by .*python.*(?s:.*)No module"):
            await world.reset({})
    broken = WorldWorkers(Environment("odd_worlds:House", paths=(HERE,), python="/no/such/python"))
    made.append(broken)
    async with broken.session() as world:
        with pytest.raises(AuthorError, match=r"does not start: .*/no/such/python"):
            await world.reset({})


async def test_no_json_is_named(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Answering")
    for kind in ("nan", "set"):
        async with workers.session() as world:
            await world.reset({"kind": kind})
            with pytest.raises(AuthorError, match="returned what is no JSON in step"):
                await world.step("a")


async def test_an_isolated_world_has_a_worker_to_itself(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Hanging", workers=2, is_isolated=True)
    most = 0

    async def play() -> None:
        nonlocal most
        async with workers.session() as world:
            await world.reset({})
            most = max(most, *(worker.num_worlds for worker in workers.workers))
            await world.step("look")

    await asyncio.gather(*(play() for _ in range(6)))
    assert most == 1 and {worker.life for worker in workers.workers} == {1}


async def test_a_caller_that_gives_up_leaves_the_worker_to_others(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Hanging")
    async with workers.session() as world, workers.session() as other:
        await world.reset({"seconds": 1.0})
        await other.reset({})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await world.step("hang")
        assert (await other.step("look"))["text"] == "You look."
    assert workers.workers[0].life == 1


async def test_a_world_that_nobody_waited_for_is_closed(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Counting")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), workers.session() as world:
            await world.reset({})
    async with workers.session() as world:
        await world.reset({})
        assert (await world.step("count"))["text"] == "There are 1."


async def test_what_worlds_have_started_ends_with_their_worker(made: list[WorldWorkers]) -> None:
    workers = workers_of(made, "Starting")
    async with workers.session() as world:
        info = (await world.reset({}))["info"]
    assert psutil.pid_exists(info["pid"])
    workers.end()
    await until(lambda: not _is_alive(info["pid"]) and not _is_alive(info["worker"]))


async def test_a_worker_may_be_ended_while_its_thread_waits_for_it(made: list[WorldWorkers]) -> None:
    for _ in range(4):
        workers = workers_of(made, "Hanging", step_timeout_s=20)
        async with workers.session() as world:
            await world.reset({})
            waiting = asyncio.create_task(world.step("hang"))
            await asyncio.sleep(0.1)
            workers.end()
            with pytest.raises(ToolFault, match=r"was ended|ended in step"):
                await waiting
        assert workers.workers[0].pid is None


def test_workers_end_with_the_process_that_has_them_however_it_ends(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.workers import workers_of
async def main():
    async with workers_of(Environment("odd_worlds:Starting", paths=({HERE!r},))).session() as world:
        info = (await world.reset({{}}))["info"]
        print(info["pid"], info["worker"], flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    child, worker = map(int, done.stdout.split())
    wait_until(lambda: not _is_alive(child) and not _is_alive(worker), timeout_s=20)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
