"""The gateway as an MCP server, with the official client: teams are tools, keys and limits are those of the other routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_scene import Engine, Scene
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from waits import until

from serve_apps.gateway.traffic.callers import make_key, write_keys
from tests.serve_apps.gateway.test_traffic_figures import Leaves

pytestmark = [pytest.mark.test, pytest.mark.anyio]


@asynccontextmanager
async def session(scene: Scene, key: str = "") -> AsyncIterator[ClientSession]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        scene.api.router.lifespan_context(scene.api),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(scene.api), headers=headers) as http,
        streamable_http_client("http://gateway/mcp", http_client=http) as (read, write, *_),
        ClientSession(read, write) as client,
    ):
        await client.initialize()
        yield client


def scene_of(model: Path, **settings: Any) -> Scene:
    scene = Scene(model, **settings)
    engine = Engine(scene)
    scene.service.client = lambda team: engine  # type: ignore[assignment, method-assign, return-value]
    return scene


@pytest.fixture
def scene(tiny_model: Path) -> Scene:
    return scene_of(tiny_model)


async def test_a_team_is_a_tool_that_answers_as_its_workflow_does(scene: Scene) -> None:
    async with session(scene) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.name == "demo" and "solver" in (tool.description or "")
        result = await client.call_tool("demo", {"prompt": "What is 6*7?"})
    data = result.structured_content
    assert not result.is_error and data["team_version"] == 3 and data["status"] in ("ok", "truncated")
    assert result.content[0].text == data["answer"]  # type: ignore[union-attr]
    (figures,) = scene.service.figures()
    assert figures["sums"]["failure_share"][0] == 1, "counted as a run"
    assert scene.service.admission.num_in_flight == 0


async def test_the_runs_of_a_user_stay_on_one_team(scene: Scene) -> None:
    scene.serve_both(share=0.5, salt="s")
    async with session(scene) as client:
        runs = [await client.call_tool("demo", {"prompt": "x", "user": "ada"}) for _ in range(12)]
    assert len({run.structured_content["team_version"] for run in runs if run.structured_content}) == 1


async def test_there_is_no_stream_to_listen_to_and_clients_are_told_so(scene: Scene) -> None:
    async with scene.api.router.lifespan_context(scene.api), scene.http() as http:
        answer = await http.get("/mcp", headers={"Accept": "text/event-stream"})
    assert answer.status_code == 405


async def test_what_a_caller_sends_is_checked_and_named(scene: Scene) -> None:
    async with session(scene) as client:
        with pytest.raises(MCPError, match="there is no tool 'nobody'; tools are demo"):
            await client.call_tool("nobody", {"prompt": "x"})
        empty = await client.call_tool("demo", {"prompt": ""})
        assert empty.is_error and "prompt: String should have at least 1 character" in empty.content[0].text  # type: ignore[union-attr]
        surrogate = await client.call_tool("demo", {"prompt": "x", "role": "admin"})
        assert surrogate.is_error and "unknown or unsupported field 'role'" in surrogate.content[0].text  # type: ignore[union-attr]
    assert scene.service.figures() == [], "a caller's fault is not the team's"


async def test_keys_hold_and_calls_count(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret, caller = make_key("caller", requests_per_minute=2)
    other, reader = make_key("reader", scopes=("metrics",))
    write_keys(file, [caller, reader])
    scene = scene_of(tiny_model, keys_file=str(file))
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    headers = {"Accept": "application/json, text/event-stream"}
    async with scene.api.router.lifespan_context(scene.api):
        for key, status in (("", 401), (other, 403), (secret, 200)):
            async with scene.http(key) as http:
                assert (await http.post("/mcp", json=call, headers=headers)).status_code == status
    scene = scene_of(tiny_model, keys_file=str(file))
    async with session(scene, secret) as client:
        for _ in range(2):
            assert not (await client.call_tool("demo", {"prompt": "x"})).is_error
        refused = await client.call_tool("demo", {"prompt": "x"})
    assert refused.is_error and "per minute" in refused.content[0].text  # type: ignore[union-attr]


async def test_a_body_that_is_no_message_or_too_large_is_refused(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_body_bytes=1000)
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    async with scene.api.router.lifespan_context(scene.api), scene.http() as http:
        statuses = [
            (await http.post("/mcp", content=body, headers=headers)).status_code
            for body in ("{", "[]", '{"jsonrpc": "2.0"}', "x" * 2000, "[" * 900)
        ]
    assert statuses == [400, 400, 400, 413, 400]


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_nothing_is_sampled_for_a_caller_who_has_left_and_its_place_is_free(
    tiny_model: Path, max_in_flight: int
) -> None:
    scene = Scene(tiny_model, max_in_flight=max_in_flight)
    engine = Engine(scene)
    engine.pause.clear()
    scene.service.client = lambda team: engine  # type: ignore[assignment, method-assign, return-value]
    admission, params = scene.service.admission, {"name": "demo", "arguments": {"prompt": "x"}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with scene.api.router.lifespan_context(scene.api):
        callers = [Leaves(scene, "/mcp", call) for _ in range(2)]
        await until(lambda: admission.num_in_flight + admission.num_waiting == 2 and engine.seen)
        for caller in callers:
            caller.now.set()
        await until(lambda: admission.num_in_flight + admission.num_waiting == 0)
        engine.pause.set()
        await asyncio.wait([caller.ended for caller in callers])
    assert len(engine.seen) == max_in_flight, "no run goes on"
    assert scene.service.figures() == [], "no failure of the team"
