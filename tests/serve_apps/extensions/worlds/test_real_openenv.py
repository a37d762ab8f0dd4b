"""A real OpenEnv server, in an environment of its own, with the household game behind it. Needs a package index."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from waits import wait_until

from pipelines.examples.household.world import House
from serve_apps.authoring.agent import ToolFault
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.openenv import openenv_session
from tests.servers import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.anyio]
ROOT = Path(__file__).parents[4]
CAPACITY = 2


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    interpreter = str(folder / "venv" / "bin" / "python")
    command = [interpreter, "-m", "pip", "install", "--quiet", "openenv==0.10.0"]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    return interpreter


@pytest.fixture
def server(python: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    script = Path(__file__).with_name("openenv_house.py")
    process = subprocess.Popen(
        [python, str(script), str(port), str(CAPACITY)], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(url), timeout_s=90)
        yield url, process
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


async def _played(url: str, seed: int) -> list[dict[str, Any]]:
    async with openenv_session(Environment(url=url)) as world:
        seen = [await world.reset({"seed": seed, "kind": "put"})]
        for place in seen[0]["info"]["unseen"].split(", "):
            seen.append(await world.step(f"go to {place}"))
            await asyncio.sleep(0.05)
    return seen


async def test_a_server_with_two_places_serves_six_worlds_one_after_the_other(
    server: tuple[str, subprocess.Popen[bytes]],
) -> None:
    played = await asyncio.gather(*(_played(server[0], seed) for seed in range(6)))
    for seed, seen in enumerate(played):
        house = House(seed=seed, kind="put")
        expected = [house.reset(), *(house.step(f"go to {place}") for place in house.room.places)]
        assert [shown["text"] for shown in seen] == [shown["text"] for shown in expected]
        assert seen[-1]["info"] == expected[-1]["info"]


async def test_a_server_that_is_killed_within_an_episode_is_a_fault_of_the_infrastructure(
    server: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, process = server
    async with openenv_session(Environment(url=url)) as world:
        await world.reset({"seed": 1, "kind": "put"})
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ToolFault, match="went away in step"):
            await world.step("look")
