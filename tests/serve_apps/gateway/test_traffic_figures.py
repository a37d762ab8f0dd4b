"""What the gateway counts of each answer, failure, copy and caller who leaves: the figures that a traffic decision reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_scene import HELLO, Engine, Scene, deployed_team
from waits import until

from serve_apps.engines.port import Piece
from serve_apps.gateway.traffic.callers import ANYONE
from serve_apps.gateway.traffic.figures import Tally
from serve_apps.gateway.traffic.teams import TeamRoute, TeamStores
from serve_apps.openai_api.protocol import ApiError
from stores.types import GenerateRequest

pytestmark = [pytest.mark.test, pytest.mark.anyio]


class Leaves:
    """A request over ASGI whose caller leaves when `now` is set."""

    def __init__(self, scene: Scene, route: str, body: Any) -> None:
        self.now = asyncio.Event()
        self._body: list[bytes] = [json.dumps(body).encode()]
        json_type = b"application/json"
        headers = [(b"host", b"gateway"), (b"content-type", json_type), (b"accept", json_type)]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": route,
            "raw_path": route.encode(),
            "root_path": "",
            "scheme": "http",
        }
        scope |= {"query_string": b"", "headers": headers, "client": ("gateway", 1), "server": ("gateway", 80)}
        scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1"}
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.ensure_future(scene.api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.now.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status.set_result(message["status"])


def figures(scene: Scene, version: int, *, of: str = "sums") -> dict[str, Any]:
    return next((f[of] for f in scene.service.figures() if f["team_version"] == version), {})


async def test_figures_of_answers_are_counted_by_team_version(scene: Scene) -> None:
    async with scene.openai() as client:
        await client.chat.completions.create(model="demo/solver", messages=HELLO)
        await client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=2, n=2)
        async for _ in await client.chat.completions.create(model="demo/solver", messages=HELLO, stream=True):
            pass
        scene.streams.error = ApiError(503, "gone", code="engine_unavailable")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="demo/solver", messages=HELLO)
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="demo/solver", messages=HELLO, stream=True):
                pass
        scene.streams.error = None
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=10_000)
    sums = figures(scene, 3)
    length = len(scene.streams.tokenizer.encode("It is 42.")) + 1
    assert sums["completion_tokens"][:2] == [3, 2 * length + 2], "per choice"
    assert sums["cut_share"] == [3, 1.0, 1.0] and sums["empty_share"][:2] == [3, 0.0] and sums["format_share"][0] == 0
    assert sums["failure_share"][:2] == [5, 2.0], "an error of the caller is not a failure"
    assert sums["latency_s"][0] == 3


async def test_a_shadow_request_is_answered_after_the_champion_and_no_caller_sees_the_reply(scene: Scene) -> None:
    scene.serve_both(shadow=1.0)
    async with scene.openai() as client:
        replies = [await client.chat.completions.create(model="demo/solver", messages=HELLO) for _ in range(4)]
        async for _ in await client.chat.completions.create(model="demo/solver", messages=HELLO, stream=True):
            pass
        async for _ in await client.chat.completions.create(model="demo/solver", messages=HELLO, stream=True):
            pass
    assert {t.system_fingerprint for t in replies} == {"demo@3"}
    await until(lambda: figures(scene, 4, of="copies").get("failure_share", [0])[0] == 6)
    assert figures(scene, 3)["failure_share"][0] == 6 and len(scene.streams.requests) == 12
    assert figures(scene, 4, of="copies")["latency_s"][0] == 0, "at low priority it says nothing about the candidate"
    assert scene.service.in_flight() == []


def shadows(scene: Scene, *, pause_s: float = 0.0, error: Exception | None = None) -> None:
    """Gives the candidate every request, and its engine a pause or an error."""
    scene.serve_both(shadow=1.0)
    asked = scene.streams.stream

    def stream(app: str, request: Any) -> Any:
        scene.streams.pause_s, scene.streams.error = (pause_s, error) if "green" in app else (0.0, None)
        return asked(app, request)

    scene.streams.stream = stream  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("engine", "outcome", "counted"),
    [
        ({"pause_s": 0.5}, "late", {}),
        ({"error": ApiError(503, "gone", code="x")}, "failed", {"failure_share": [1, 1.0, 1.0]}),
    ],
)
async def test_what_goes_wrong_with_a_shadow_request_is_invisible_to_callers_and_counts_where_the_candidate_failed(
    tiny_model: Path, engine: Any, outcome: str, counted: Any
) -> None:
    scene = Scene(tiny_model, request_timeout_s=0.3)
    shadows(scene, **engine)
    async with scene.openai() as client:
        answer = await client.chat.completions.create(model="demo/solver", messages=HELLO)
    assert answer.choices[0].message.content == "It is 42."
    said = f'troupe_gateway_shadows_total{{outcome="{outcome}",team="demo",version="4"}} 1.0'
    await until(lambda: said in scene.service.metrics.text({"demo"}))
    assert {name: sums for name, sums in figures(scene, 4, of="copies").items() if sums[0]} == counted
    assert scene.service.in_flight() == []


async def test_too_many_shadow_requests_are_dropped_and_the_set_of_the_others_is_busy(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_shadows=1)
    shadows(scene, pause_s=0.2)
    async with scene.openai() as client:
        for _ in range(3):
            await client.chat.completions.create(model="demo/solver", messages=HELLO)
    assert [f["num"] for f in scene.service.in_flight()] == [1]
    text = scene.service.metrics.text({"demo"})
    assert 'troupe_gateway_shadows_total{outcome="dropped",team="demo",version="4"} 2.0' in text
    await until(lambda: scene.service.in_flight() == [])


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/workflows/demo/runs", "/v1/completions", "/tokenize"])
async def test_a_caller_who_leaves_the_queue_leaves_its_place(tiny_model: Path, route: str) -> None:
    scene = Scene(tiny_model, max_in_flight=1)
    slot = await scene.service.take_slot("demo", None, ANYONE)
    model = "demo/solver" if "chat" in route else "demo/group/shared"
    asked = {"prompt": "a"} | ({} if "runs" in route else {"model": model})
    leaves = Leaves(scene, route, asked if "chat" not in route else {"model": model, "messages": HELLO})
    await until(lambda: scene.service.admission.num_waiting == 1)
    leaves.now.set()
    assert await leaves.status == 499 and scene.service.admission.num_waiting == 0
    slot.release()
    assert scene.service.admission.num_in_flight == 0 and scene.service.figures() == []


async def test_what_was_sampled_for_a_caller_who_left_counts_as_tokens_of_its_key(scene: Scene) -> None:
    scene.streams.pause_s = 0.2
    leaves = Leaves(scene, "/v1/chat/completions", {"model": "demo/solver", "messages": HELLO, "stop": "#"})
    await until(lambda: scene.streams.num_said >= 2)
    leaves.now.set()
    assert await leaves.status == 499
    text = scene.service.metrics.text({"demo"})
    said = f'troupe_gateway_completion_tokens_total{{team="demo",version="3"}} {scene.streams.num_said}.0'
    assert said in text
    assert figures(scene, 3) == {} and scene.service.admission.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/workflows/demo/runs"])
async def test_a_hanging_team_is_slow_also_where_its_callers_leave_before_the_error(
    scene: Scene, route: str, stream: bool
) -> None:
    """Ten answers of 10 ms; then the engine hangs, and each caller gives up after 0.2 s: nothing counted them before."""
    for _ in range(10):
        slot = await scene.service.take_slot("demo", None, ANYONE)
        slot._began -= 0.01
        scene.service.count_answer(slot, ANYONE, 1, {"completion_tokens": 1.0})
        slot.release()
    scene.streams.pause_s, engine = 30.0, Engine(scene)
    engine.pause.clear()
    scene.service.client = lambda team: engine  # type: ignore[assignment, method-assign, return-value]
    asked = {"prompt": "a"} if "runs" in route else {"model": "demo/solver", "messages": HELLO}
    for waited_s in (0.2, 0.2, 0.0):
        leaves = Leaves(scene, route, {**asked, "stream": stream})
        await until(lambda: scene.service.admission.num_in_flight == 1)
        await asyncio.sleep(waited_s)
        leaves.now.set()
        await until(lambda: scene.service.admission.num_in_flight == 0)
        await leaves.ended
    num, whole, _ = figures(scene, 3)["latency_s"]
    assert num == 12 and whole > 0.5, "who left at once said nothing of the team"
    assert figures(scene, 3)["failure_share"] == [10, 0.0, 0.0]


async def test_copies_are_compared_with_the_answers_to_the_same_requests_and_no_others(scene: Scene) -> None:
    """The champion fails what is never copied, and answers long before there are copies: neither is what a copy stands beside."""
    scene.streams.text = "one two three four five six"
    async with scene.openai() as client:
        for _ in range(3):
            await client.chat.completions.create(model="demo/solver", messages=HELLO)
        scene.streams.text = "It is 42."
        scene.serve_both(shadow=1.0)
        for _ in range(4):
            await client.chat.completions.create(model="demo/solver", messages=HELLO)
        await until(lambda: figures(scene, 4, of="copies").get("failure_share", [0])[0] == 4)
    (row,) = (row for row in scene.service.figures() if row["team_version"] == 4)
    for name in ("completion_tokens", "cut_share", "empty_share"):
        assert row["shadowed"][name] == row["copies"][name] and row["copies"][name][0] == 4
    assert row["sums"] == Tally().sums, "it answered nobody"
    assert figures(scene, 3)["failure_share"][0] == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_engine_aborts_is_a_failure_and_no_answer(
    tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    scene = Scene(tiny_model, capture={"share": 1.0, "flush_s": 60})
    stores = TeamStores(run_id="demo", traces=str(tmp_path / "traces"), served=str(tmp_path / "served"))
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue"), stores=stores))

    async def aborted(app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        yield Piece(token_ids=[5], logprobs=[-0.5], top_logprobs=[], finish_reason="", policy_version=3)
        yield Piece(token_ids=[6], logprobs=[-0.5], top_logprobs=[], finish_reason="abort", policy_version=-1)

    scene.streams.stream = aborted  # type: ignore[assignment, method-assign]
    body = {"model": "demo/solver", "messages": HELLO, "store": True, "stream": stream}
    async with scene.http() as http:
        assert "the engine aborted the request" in (await http.post("/v1/chat/completions", json=body)).text
    sums = figures(scene, 3)
    assert sums["failure_share"] == [1, 1.0, 1.0] and sums["latency_s"][0] == 0
    assert not scene.service.capture._of_team["demo"]._pending
    await scene.service.capture.close()


async def test_an_unforeseen_error_is_a_500_in_the_metrics_and_a_failure_of_the_team(scene: Scene) -> None:
    scene.streams.error = KeyError("a bug")
    body = {"model": "demo/solver", "messages": HELLO}
    async with scene.http() as http:
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        metrics = (await http.get("/metrics")).text
        await http.post("/v1/chat/completions", json={**body, "stream": True})
    assert 'troupe_gateway_requests_total{route="/v1/chat/completions",status="500"} 1.0' in metrics
    assert figures(scene, 3)["failure_share"] == [2, 2.0, 2.0]
    assert scene.service.in_flight() == [] and scene.service.admission.num_in_flight == 0
