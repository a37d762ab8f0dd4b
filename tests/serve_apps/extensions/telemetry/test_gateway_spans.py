"""Spans of a gateway's requests: in the trace of the caller, found by the id of the answer, without texts and keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, deployed_team, keys_file
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from seen_spans import Seen, exported, spans_of, tree_of
from waits import until

from pipelines.examples.calculator import program as calculator
from serve_apps.gateway.traffic.callers import make_key
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute
from serve_apps.openai_api.protocol import ApiError
from tests.serve_apps.extensions.episodes.test_gateway_episodes import ADD, MULTIPLY, Engine, Stage, chat, client_of
from tests.serve_apps.extensions.mcp_server.test_mcp_api import session

pytestmark = [pytest.mark.test, pytest.mark.anyio]

TELEMETRY = {"endpoint": "http://127.0.0.1:9"}
CALLER_TRACE, CALLER_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
SECRET = "the harvest of 1911"
ASK: dict[str, Any] = {
    "model": "demo/solver",
    "messages": [{"role": "user", "content": SECRET}],
    "metadata": {"customer": SECRET},
    "user": SECRET,
}


@pytest.fixture
def memory() -> Iterator[InMemorySpanExporter]:
    with exported(**TELEMETRY) as memory:
        yield memory


@pytest.fixture
def scene(tiny_model: Path) -> Scene:
    return Scene(tiny_model, telemetry=TELEMETRY)


def doubling_team(model: Path) -> DeployedTeam:
    made = deployed_team(model, 3, "blue")
    agents = ("writer", "reader")
    changes = {
        "workflow": "doubling_team:Doubling",
        "group_of": dict.fromkeys(agents, "shared"),
        "sampling": {name: {"max_tokens": 32} for name in agents},
    }
    return made.model_copy(update={"team_spec": made.team_spec | changes})


async def test_a_streamed_chat_is_a_request_of_its_callers_trace_and_a_model_call_below_it(
    scene: Scene, memory: InMemorySpanExporter
) -> None:
    async with scene.http() as http:
        answer = await http.post("/v1/chat/completions", json={**ASK, "stream": True, "seed": 5}, headers=TRACEPARENT)
    chunk = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))
    request, call = spans_of(memory)
    assert (request.name, request.kind, request.parent_id) == ("POST /v1/chat/completions", "SERVER", CALLER_SPAN)
    assert {span.trace_id for span in (request, call)} == {CALLER_TRACE} and call.parent_id == request.span_id
    assert request.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "network.protocol.version": "1.1",
        "server.address": "gateway",
        "troupe.request_id": chunk["id"],
    }
    assert (call.name, call.kind, call.is_error) == ("chat demo/solver", "CLIENT", False)
    assert call.attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    (asked,) = scene.streams.requests
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "troupe",
        "gen_ai.request.model": "demo/solver",
        "gen_ai.request.max_tokens": 32,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stream": True,
        "gen_ai.agent.name": "solver",
        "gen_ai.response.id": chunk["id"],
        "gen_ai.response.model": "shared@3",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(asked.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(scene.streams.tokenizer.encode("It is 42.")) + 1,
        "troupe.team": "demo",
        "troupe.team_version": 3,
        "troupe.alias": "champion",
        "troupe.model_group": "shared",
        "troupe.policy_version": 3,
    }


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": ASK["messages"], "n": 2}, "chat"),
        ("/v1/responses", {"input": SECRET}, "chat"),
        ("/v1/completions", {"prompt": SECRET}, "text_completion"),
    ],
)
async def test_each_way_to_ask_has_the_id_of_its_answer(
    scene: Scene, memory: InMemorySpanExporter, path: str, body: Any, operation: str
) -> None:
    async with scene.http() as http:
        answer = await http.post(path, json={"model": "demo/group/shared", **body}, headers={"x-request-id": "own"})
        for other in ("/health", "/v1/models", "/metrics", "/"):
            await http.get(other)
    request, call = spans_of(memory)
    assert call.name == f"{operation} demo/group/shared" and "gen_ai.agent.name" not in call.attributes
    assert call.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert call.attributes.get("gen_ai.request.choice.count", 1) == body.get("n", 1)
    assert request.attributes["troupe.request_id"] == "own" == answer.headers["x-request-id"]
    assert SECRET not in repr([request, call])


@pytest.mark.parametrize("streams", [False, True])
async def test_a_run_of_a_workflow_has_a_span_for_each_turn_and_tool_call(
    scene: Scene, memory: InMemorySpanExporter, streams: bool
) -> None:
    scene.serve(TeamRoute(champion=doubling_team(scene.model)))
    scene.service.client = lambda team: Engine(scene, *["<ANSWER>12</ANSWER>"] * 2)  # type: ignore[assignment, method-assign, return-value]
    async with scene.http() as http:
        body = {"prompt": SECRET, "metadata": {"customer": SECRET}, "stream": streams}
        answer = await http.post("/v1/workflows/demo/runs", json=body)
    last = answer.json() if not streams else json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    spans = spans_of(memory)
    calls = [("invoke_agent writer", ["chat shared"]), "execute_tool double", ("invoke_agent reader", ["chat shared"])]
    assert tree_of(spans) == [("POST /v1/workflows/{team}/runs", [("invoke_workflow demo", calls)])]
    for span in spans[1:]:
        expected = {"troupe.team": "demo", "troupe.team_version": 3, "troupe.episode_id": last["id"]}
        assert span.attributes.items() >= expected.items()
    assert spans[1].attributes["gen_ai.response.id"] == last["id"] and last["status"] == "ok"
    assert SECRET not in repr(spans)


async def test_an_engine_that_fails_is_named_by_its_code(scene: Scene, memory: InMemorySpanExporter) -> None:
    scene.streams.error = ApiError(503, f"no engine for {SECRET}", code="engine_unavailable")
    async with scene.http() as http:
        answer = await http.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 503
    request, call = spans_of(memory)
    assert (call.is_error, call.attributes["error.type"], call.message) == (True, "engine_unavailable", "")
    assert (request.is_error, request.attributes["error.type"]) == (True, "503")
    assert SECRET not in repr([request, call])


async def test_an_unforeseen_error_is_a_500_and_a_refused_body_is_none_of_ours(
    scene: Scene, memory: InMemorySpanExporter
) -> None:
    scene.streams.error = ZeroDivisionError(SECRET)
    async with scene.http() as http:
        await http.post("/v1/chat/completions", json=ASK)
        await http.post("/v1/chat/completions", json={**ASK, "model": "demo/nobody"})
        await http.post("/no/such/route", json=ASK)
    failed, call, unknown, lost = spans_of(memory)
    assert (failed.attributes["http.response.status_code"], failed.attributes["error.type"]) == (
        500,
        "ZeroDivisionError",
    )
    assert call.attributes["error.type"] == "ZeroDivisionError"
    assert (unknown.attributes["http.response.status_code"], unknown.is_error) == (404, False)
    assert (lost.name, lost.attributes["http.response.status_code"]) == ("POST", 404)
    assert SECRET not in repr(spans_of(memory))


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_that_leaves_ends_its_spans_as_cancelled(
    tiny_model: Path, memory: InMemorySpanExporter, streams: bool
) -> None:
    scene = Scene(tiny_model, telemetry=TELEMETRY)
    scene.streams.text = "one two three four five six seven eight nine ten " * 3
    scene.streams.pause_s = 0.01 if streams else 600
    body = json.dumps({**ASK, "stream": streams, "max_tokens": 100}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    has_left, num_sent = asyncio.Event(), 0

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        if not streams:
            await until(lambda: scene.streams.num_open)
            has_left.set()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 5:
            has_left.set()

    headers = [(b"host", b"gateway"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("gateway", 8000), "root_path": ""}
    await scene.api(scope, receive, send)  # type: ignore[arg-type]
    request, call = spans_of(memory)
    assert scene.streams.num_open == 0 and scene.service.admission.num_in_flight == 0
    assert (call.attributes["error.type"], call.is_error) == ("cancelled", True)
    assert request.attributes["server.port"] == 8000
    if streams:
        assert 0 < call.attributes["gen_ai.usage.output_tokens"] < 100
        assert request.attributes["error.type"] == "cancelled"
    else:
        assert request.attributes["http.response.status_code"] == 499


async def test_a_caller_decides_whether_its_trace_is_recorded(scene: Scene, memory: InMemorySpanExporter) -> None:
    async with scene.http() as http:
        for header in (TRACEPARENT["traceparent"][:-1] + "0", "not a trace"):
            await http.post("/v1/chat/completions", json=ASK, headers={"traceparent": header})
    spans = spans_of(memory)
    assert len(spans) == 2 and CALLER_TRACE not in {span.trace_id for span in spans}
    assert spans[0].parent_id == "", "what cannot be read begins a trace"


async def test_requests_without_a_key_make_no_spans_and_no_key_stands_in_one(
    tiny_model: Path, tmp_path: Path, memory: InMemorySpanExporter
) -> None:
    key, stored = make_key("alice")
    scene = Scene(tiny_model, telemetry=TELEMETRY, keys_file=keys_file(tmp_path, stored))
    for given, status in (("wrong", 401), ("", 401), (key, 200)):
        async with scene.http(given) as http:
            assert (await http.post("/v1/chat/completions", json=ASK)).status_code == status
    spans = spans_of(memory)
    assert len(spans) == 2 and key not in repr(spans) and "alice" not in repr(spans)


async def test_calls_of_a_program_belong_to_its_own_traces_and_lead_to_the_episode(
    tiny_model: Path, tmp_path: Path, memory: InMemorySpanExporter
) -> None:
    stage = Stage(tiny_model, tmp_path, MULTIPLY, ADD, "55", telemetry=TELEMETRY)
    async with stage.opened(prompt="7+6*8") as (http, episode):
        http.headers.update(TRACEPARENT)
        await calculator.answer("7+6*8", client_of(http, episode["base_url"]))
        await http.post(f"{episode['base_url']}/outcome", json={"answer": "55", "score": 1})
    spans = spans_of(memory)
    own = [span for span in spans if span.trace_id != CALLER_TRACE]
    assert tree_of(own) == [("POST /v1/episodes", [("invoke_workflow demo", ["execute_tool calculate"] * 2)])]
    calls = [span for span in spans if span.name == "chat shared"]
    assert {span.linked_spans for span in calls} == {(own[1].span_id,)}
    requests = {span.span_id: span for span in spans if span.parent_id == CALLER_SPAN}
    assert [requests[call.parent_id].name for call in calls] == ["POST /v1/episodes/{episode_id}/chat/completions"] * 3
    expected = [f"chatcmpl-{episode['id']}-{turn.turn_index}" for turn in (await stage.kept())[0].turns]
    assert [call.attributes["gen_ai.response.id"] for call in calls] == expected
    assert {span.attributes["troupe.episode_id"] for span in [*calls, *own[1:]]} == {episode["id"]}


async def test_texts_are_shown_where_asked_for_and_never_those_that_may_not_be_stored(
    tiny_model: Path, tmp_path: Path
) -> None:
    telemetry = {**TELEMETRY, "texts": True}
    stage = Stage(tiny_model, tmp_path, telemetry=telemetry)

    async def texts(store: bool | None) -> list[Seen]:
        scene = Scene(tiny_model, telemetry=telemetry)
        with exported(**telemetry) as memory:
            async with session(scene) as client, scene.http() as http:
                await http.post("/v1/chat/completions", json={**ASK, "store": store})
                scene.service.client = lambda team: Engine(scene, *[SECRET] * 4)  # type: ignore[assignment, method-assign, return-value]
                await http.post("/v1/workflows/demo/runs", json={"prompt": SECRET, "store": store})
                await client.call_tool("demo", {"prompt": SECRET, "store": store})
            stage.engine.left = ["x"]
            async with stage.opened() as (http, episode):
                await chat(http, episode, text=SECRET, store=store)
                await http.post(f"{episode['base_url']}/outcome", json={"answer": SECRET})
            return [span for span in spans_of(memory) if SECRET in repr(span)]

    shown = [span.name for span in await texts(None)]
    assert {"chat demo/solver", "invoke_workflow demo", "chat shared"} == set(shown)
    assert shown.count("invoke_workflow demo") == 3, "a run, one of MCP, and an episode"
    assert await texts(False) == []
