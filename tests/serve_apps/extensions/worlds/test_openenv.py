"""Worlds of an OpenEnv server: one per connection, waited for where it is full, and a fault of the infrastructure where it is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from odd_worlds import Corridor, Raising
from openenv_server import Server, serving, serving_in_a_thread

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.openenv import openenv_session, reach
from stores.types import Cause

pytestmark = [pytest.mark.test, pytest.mark.anyio]


def kind(server: Server, **settings: Any) -> Environment:
    return Environment(url=f"http://127.0.0.1:{server.port}", **settings)


async def walk(environment: Environment, length: int) -> list[str]:
    async with openenv_session(environment) as world:
        texts = [(await world.reset({"length": length}))["text"]]
        while True:
            seen = await world.step("walk")
            texts.append(seen["text"])
            if seen["is_done"]:
                return texts


async def test_a_connection_is_a_world_with_a_reward_and_an_end() -> None:
    async with serving(Corridor) as server, openenv_session(kind(server)) as world:
        assert (await world.reset({"length": 2}))["text"] == "You are at the beginning."
        await world.step("walk")
        assert await world.step("walk") == {
            "text": "You have walked 2 of 2.",
            "reward": 0.5,
            "is_done": True,
            "info": {"done": 2},
        }
        assert server.num_open == 1
    assert server.num_open == 0


async def test_a_server_that_is_full_is_asked_again_until_it_has_room() -> None:
    async with serving(Corridor, capacity=2) as server:
        walked = await asyncio.gather(*(walk(kind(server), 3) for _ in range(6)))
    assert all(texts[-1] == "You have walked 3 of 3." for texts in walked)
    assert server.num_refused > 0 and server.most_open == 2


async def test_a_server_that_stays_full_or_is_gone_is_a_fault_of_the_infrastructure() -> None:
    async with (
        serving(Corridor, capacity=0) as server,
        openenv_session(kind(server, reset_timeout_s=0.7, step_timeout_s=0.5)) as world,
    ):
        with pytest.raises(ToolFault, match=r"is full: no world within reset_timeout_s = 0\.7"):
            await world.reset({})
    gone = kind(server, reset_timeout_s=0.7, step_timeout_s=0.5)
    async with openenv_session(gone) as world:
        with pytest.raises(
            ToolFault, match=r"http://127\.0\.0\.1:\d+ cannot be reached: .*: no world within reset_timeout_s = 0\.7"
        ):
            await world.reset({})
    with pytest.raises(ToolFault, match=r"http://127\.0\.0\.1:\d+ cannot be reached: "):
        await reach(kind(server))


async def test_a_server_that_is_started_again_is_waited_for() -> None:
    async with serving(Corridor) as first:
        pass
    walking = asyncio.create_task(walk(kind(first), 3))
    await asyncio.sleep(0.3)
    async with serving(Corridor, port=first.port):
        assert (await walking)[-1] == "You have walked 3 of 3."


async def test_a_server_that_ends_or_falls_silent_within_an_episode_is_a_fault_of_the_infrastructure() -> None:
    async with AsyncExitStack() as stack:
        async with serving(Corridor) as server:
            world = await stack.enter_async_context(openenv_session(kind(server)))
            await world.reset({})
        with pytest.raises(ToolFault, match="went away in step"):
            await world.step("walk")
    async with (
        serving(Corridor, falls_silent=True) as server,
        openenv_session(kind(server, step_timeout_s=0.3)) as world,
    ):
        await world.reset({})
        with pytest.raises(ToolFault, match=r"gave no answer to step within step_timeout_s = 0\.3"):
            await world.step("walk")


async def test_an_error_that_the_server_answers_with_is_what_the_world_raised() -> None:
    async with serving(Raising) as server, openenv_session(kind(server)) as world:
        await world.reset({"place": "step"})
        with pytest.raises(ToolRaised, match="EXECUTION_ERROR: KeyError: 'jump'"):
            await world.step("jump")


async def test_a_server_that_refuses_the_settings_is_no_outcome_of_a_policy() -> None:
    async with serving(Raising) as server, openenv_session(kind(server)) as world:
        with pytest.raises(AuthorError, match=r"begins no world with .*'reset'.*ValueError: no such house"):
            await world.reset({"place": "reset"})


@dataclass
class Computing:
    """A server whose world computes in `reset` and `step`, with its event loop, until it may go on."""

    server: Server = field(init=False)
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> dict[str, Any]:
        self.has_begun.set()
        self.may_go_on.wait()
        return {"text": "It took long."}

    def step(self, action: str) -> dict[str, Any]:
        return self.reset()


@contextmanager
def computing() -> Iterator[Computing]:
    world = Computing()
    with serving_in_a_thread(lambda: world) as world.server:
        try:
            yield world
        finally:
            world.may_go_on.set()


async def test_a_server_may_compute_as_long_as_the_timeouts_of_the_environment_say() -> None:
    with computing() as world:
        async with openenv_session(kind(world.server)) as session:
            beginning = asyncio.create_task(session.reset({}))
            await asyncio.to_thread(world.has_begun.wait)
            assert session._socket is not None and session._socket.ping_interval is None, "it would answer no ping"
            world.may_go_on.set()
            assert (await beginning)["text"] == "It took long."


@pytest.mark.parametrize(
    ("timeout_cause", "error"), [(Cause.INFRASTRUCTURE, ToolFault), (Cause.POLICY, ToolRaised)], ids=str
)
async def test_a_server_that_computes_too_long_is_said_with_the_timeout_that_it_passed(
    timeout_cause: Any, error: type[Exception]
) -> None:
    with computing() as world:
        short = kind(world.server, reset_timeout_s=1, step_timeout_s=0.2, timeout_cause=timeout_cause)
        async with openenv_session(short) as session:
            with pytest.raises(ToolFault, match=r"did not answer reset: no world within reset_timeout_s = 1"):
                await session.reset({})
            async with openenv_session(short) as other:
                with pytest.raises(ToolFault, match=r"did not take the connection: .* reset_timeout_s = 1"):
                    await other.reset({})
            world.may_go_on.set()
        async with openenv_session(kind(world.server, step_timeout_s=0.2, timeout_cause=timeout_cause)) as session:
            await session.reset({})
            world.may_go_on.clear()
            with pytest.raises(error, match=r"gave no answer to step within step_timeout_s = 0\.2"):
                await session.step("walk")
            world.may_go_on.set()
