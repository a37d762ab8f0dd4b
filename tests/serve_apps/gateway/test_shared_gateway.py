"""Two teams behind one gateway: a key reaches its own team on every route, and learns nothing of the other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_scene import Scene, deployed_team
from waits import until

from serve_apps.config import CaptureConfig, GatewayTeamConfig
from serve_apps.gateway.traffic.callers import ANYONE, SCOPES, make_key, write_keys
from serve_apps.gateway.traffic.capture import MAX_SEARCHES
from serve_apps.gateway.traffic.teams import TeamRoute, TeamStores
from serve_apps.openai_api.protocol import ApiError
from stores.traces.served import ServedStore

pytestmark = [pytest.mark.test, pytest.mark.anyio]

HELLO: list[Any] = [{"role": "user", "content": "mail bob@example.com"}]


class Shared:
    """Teams `a` and `b` with a key named `web` each, and team `open` without keys."""

    def __init__(self, model: Path, folder: Path, *names: str, **changes: dict[str, Any]) -> None:
        self.scene, self.folder, self.model = Scene(model), folder, model
        self.secrets, self.settings = {"open": ""}, {"open": GatewayTeamConfig(allowed_hosts=("gateway",))}
        for name in ("a", "b"):
            self.secrets[name], key = make_key("web", scopes=SCOPES)
            write_keys(folder / f"{name}.json", [key])
            own = {"keys_file": str(folder / f"{name}.json"), **changes.get(name, {})}
            self.settings[name] = GatewayTeamConfig.model_validate(own)
        self.share(*names)

    def share(self, *names: str) -> None:
        self.scene.share({name: self.route(name) for name in names})

    def route(self, name: str) -> TeamRoute:
        stores = TeamStores(
            run_id=name, traces=str(self.folder / f"{name}-traces"), served=str(self.folder / f"{name}-served")
        )
        champion = deployed_team(self.model, 3, "blue")
        return TeamRoute(champion=champion, stores=stores, settings=self.settings[name])

    async def ask(self, method: str, path: str, *, by: str, **more: Any) -> httpx.Response:
        async with self.scene.http(self.secrets[by]) as http:
            return await http.request(method, path, **more)

    async def chat(self, team: str, *, by: str, **headers: str) -> int:
        body = {"model": f"{team}/solver", "messages": HELLO, "store": True}
        return (await self.ask("POST", "/v1/chat/completions", by=by, json=body, headers=headers)).status_code


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
async def test_every_route_knows_a_caller_by_the_keys_of_the_team_it_asks(
    tiny_model: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    shared = Shared(tiny_model, tmp_path, *names)
    own, other = names
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/v1/chat/completions", {"model": f"{own}/solver", "messages": HELLO}),
        ("POST", "/v1/responses", {"model": f"{own}/solver", "input": "hi"}),
        ("POST", "/v1/completions", {"model": f"{own}/group/shared", "prompt": "hi"}),
        ("POST", "/tokenize", {"model": f"{own}/solver", "prompt": "hi"}),
        ("POST", "/detokenize", {"model": f"{own}/solver", "tokens": [3]}),
        ("POST", "/v1/episodes", {"team": own}),
        ("GET", f"/v1/models/{own}/solver", None),
        ("GET", f"/v1/admin/teams/{own}/traces", None),
    ]
    for method, path, body in asked:
        statuses = [(await shared.ask(method, path, by=by, json=body)).status_code for by in (own, other)]
        assert statuses == [200, 404], path
        assert (await shared.ask(method, path, by="open", json=body)).status_code == 401, path
    run = await shared.ask("POST", f"/v1/workflows/{own}/runs", by=other, json={"prompt": "hi"})
    assert run.status_code == 404 and f"{own}'" not in run.json()["error"]["message"].partition("teams are")[2]
    for path in ("/v1/models", "/metrics", "/v1/admin/status", "/ready"):
        told = (await shared.ask("GET", path, by=own)).text
        assert not re.search(f'"{other}("|/|--)', told) and re.search(f'"{own}("|/|--)', told), path


async def test_what_one_key_began_is_not_the_other_keys_of_the_same_name(tiny_model: Path, tmp_path: Path) -> None:
    captured = {"capture": {"share": 1.0, "flush_s": 0.01}}
    shared = Shared(tiny_model, tmp_path, "a", "b", a=captured, b=captured)
    body = {"model": "a/solver", "messages": HELLO, "store": True}
    answer = (await shared.ask("POST", "/v1/chat/completions", by="a", json=body)).json()
    feedback = f"/v1/traces/{answer['id']}/feedback"
    assert [(await shared.ask("POST", feedback, by=by, json={"score": 1})).status_code for by in "ba"] == [404, 200]
    kept = (await shared.ask("POST", "/v1/responses", by="a", json={"model": "a/solver", "input": "hi"})).json()["id"]
    more = {"input": "and?", "previous_response_id": kept}
    assert [
        (await shared.ask("POST", "/v1/responses", by=by, json={"model": f"{by}/solver", **more})).status_code
        for by in "ba"
    ] == [404, 200]
    episode = (await shared.ask("POST", "/v1/episodes", by="a", json={"team": "a"})).json()
    for path in (f"{episode['base_url']}/models",):
        assert [(await shared.ask("GET", path, by=by)).status_code for by in "ba"] == [404, 200]
    assert (await shared.ask("POST", f"{episode['base_url']}/outcome", by="b", json={"score": 1})).status_code == 404
    assert (await shared.ask("POST", f"{episode['base_url']}/outcome", by="a", json={"score": 1})).status_code == 200
    assert (await shared.ask("GET", f"{episode['base_url']}/models", by="b")).status_code == 404
    assert (await shared.ask("GET", f"{episode['base_url']}/models", by="a")).status_code == 410
    await shared.scene.service.capture.close()


async def test_a_team_without_keys_opens_itself_alone(tiny_model: Path, tmp_path: Path) -> None:
    for names in (("a", "open"), ("open", "a")):
        shared = Shared(tiny_model, tmp_path, *names)
        assert [await shared.chat("open", by=by) for by in ("open", "a")] == [200, 200]
        assert [await shared.chat("a", by=by) for by in ("open", "b", "a")] == [401, 401, 200]
        unknown = await shared.ask("POST", "/tokenize", by="open", json={"model": "a/nobody", "prompt": ""})
        hidden = await shared.ask("POST", "/tokenize", by="open", json={"model": "a/solver", "prompt": ""})
        same = unknown.json()["error"]["message"].replace("nobody", "solver")
        assert hidden.json()["error"]["message"] == same and "a/group" not in same, "what there is is not told"
        models = (await shared.ask("GET", "/v1/models", by="open")).json()["data"]
        assert {model["owned_by"] for model in models} == {"open"}
        tools = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
        async with shared.scene.api.router.lifespan_context(shared.scene.api):
            told = (await shared.ask("POST", "/mcp", by="open", json=tools, headers=headers)).json()
            call = {"name": "a", "arguments": {"prompt": "hi"}}
            called = await shared.ask(
                "POST", "/mcp", by="open", json={**tools, "method": "tools/call", "params": call}, headers=headers
            )
        assert [tool["name"] for tool in told["result"]["tools"]] == ["open"]
        assert "there is no tool 'a'; tools are open" in called.text


async def test_feedback_counts_towards_the_rate_of_its_key_beside_a_team_without_keys(
    tiny_model: Path, tmp_path: Path
) -> None:
    shared = Shared(tiny_model, tmp_path, a={"capture": {"flush_s": 0.01}})
    shared.settings["open"] = shared.settings["open"].model_copy(update={"capture": CaptureConfig(flush_s=0.01)})
    shared.secrets["a"], key = make_key("web", scopes=SCOPES, requests_per_minute=2)
    write_keys(tmp_path / "a.json", [key])
    shared.share("open", "a")
    given = [await shared.ask("POST", "/v1/traces/x/feedback", by="a", json={"score": 1}) for _ in range(3)]
    assert [answer.status_code for answer in given] == [404, 404, 429]
    assert "API key 'web'" in given[0].text and "API key 'web'" in given[2].text


async def test_each_team_is_stored_as_its_own_settings_say_and_as_they_were_when_it_answered(
    tiny_model: Path, tmp_path: Path
) -> None:
    redacted = {"capture": {"share": 1.0, "flush_s": 0.01, "redact": {r"[\w.]+@[\w.]+": "<email>"}}}
    plain = {"capture": {"share": 1.0, "flush_s": 60.0}}
    shared = Shared(tiny_model, tmp_path, "a", "b", a=redacted, b=plain)
    assert [await shared.chat(team, by=team) for team in "ab"] == [200, 200]
    shared.settings["b"] = GatewayTeamConfig.model_validate({**redacted, "keys_file": str(tmp_path / "b.json")})
    shared.share("a", "b")
    await asyncio.sleep(0)
    assert await shared.chat("b", by="b") == 200
    shared.share("a")
    await shared.scene.service.capture.close()
    prompts = {
        name: sorted(trace.task.prompt for trace in ServedStore(str(tmp_path / f"{name}-served")).find_traces())
        for name in "ab"
    }
    assert prompts == {"a": ["mail <email>"], "b": ["mail <email>", "mail bob@example.com"]}


async def test_feedback_that_waits_for_one_teams_next_write_keeps_no_other_team_waiting(
    tiny_model: Path, tmp_path: Path
) -> None:
    slow, fast = {"capture": {"flush_s": 60.0}}, {"capture": {"share": 1.0, "flush_s": 0.01}}
    shared = Shared(tiny_model, tmp_path, "a", "b", a=slow, b=fast)
    body = {"model": "b/solver", "messages": HELLO, "store": True}
    answer = (await shared.ask("POST", "/v1/chat/completions", by="b", json=body)).json()
    looked_for = 0

    async def nothing(*_: Any, **__: Any) -> bool:
        nonlocal looked_for
        looked_for += 1
        return False

    shared.scene.service.capture._of_team["a"].has_answer = nothing  # type: ignore[method-assign]
    waiting = [
        asyncio.ensure_future(shared.ask("POST", "/v1/traces/x/feedback", by="a", json={"score": 1}))
        for _ in range(MAX_SEARCHES)
    ]
    await until(lambda: looked_for == MAX_SEARCHES)
    given = await shared.ask("POST", f"/v1/traces/{answer['id']}/feedback", by="b", json={"score": 1})
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await shared.scene.service.capture.close()
    assert given.status_code == 200, given.text


async def test_a_caller_of_one_team_leaves_places_to_the_other(tiny_model: Path, tmp_path: Path) -> None:
    shared = Shared(tiny_model, tmp_path, "a", "b")
    assert shared.scene.service.share_of_a_key == 0.75
    shared.share("a")
    assert shared.scene.service.share_of_a_key == 1.0


async def test_a_caller_whose_team_goes_while_it_waits_is_told_no_other_teams_name(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_in_flight=1)
    route = TeamRoute(champion=deployed_team(tiny_model, 3, "blue"))
    scene.share({"secret": route, "demo": route})
    slot = await scene.service.take_slot("secret", None, ANYONE)
    waits = asyncio.ensure_future(scene.service.take_slot("demo", None, ANYONE))
    await until(lambda: scene.service.admission.num_waiting)
    scene.share({"secret": route})
    slot.release()
    with pytest.raises(ApiError, match="no team 'demo'") as refused:
        await waits
    assert refused.value.status == 404 and "secret" not in str(refused.value)
    assert scene.service.admission.num_in_flight == 0


async def test_a_replica_stops_although_an_answer_is_just_timing_out(tiny_model: Path) -> None:
    service = Scene(tiny_model, request_timeout_s=0.05).service
    is_ending = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            is_ending.set()
            await asyncio.sleep(0.1)

    answer = asyncio.ensure_future(service.within_timeout(slow_to_end()))
    await is_ending.wait()
    service.end_answers(within_s=18)
    with pytest.raises(ApiError):
        await answer


async def test_a_replica_that_stops_also_tells_a_caller_who_waited_in_the_queue(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_in_flight=1)
    scene.streams.pause_s = 600.0
    slot = await scene.service.take_slot("demo", None, ANYONE)
    async with scene.http() as http:
        body = {"model": "demo/solver", "messages": HELLO}
        waits = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
        await until(lambda: scene.service.admission.num_waiting)
        scene.service.end_answers(within_s=0.1)
        slot.release()
        assert (await waits).status_code == 503 and (await waits).json()["error"]["code"] == "replica_gone"


async def test_a_replica_that_stops_tells_the_callers_whose_answers_it_cannot_end(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.streams.pause_s = 5.0
    body = {"model": "demo/solver", "messages": HELLO}
    async with scene.http() as http:
        whole = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
        streamed = asyncio.ensure_future(http.post("/v1/chat/completions", json={**body, "stream": True}))
        await until(lambda: scene.streams.num_open == 2)
        scene.service.end_answers(within_s=0)
        assert (await whole).status_code == 503 and (await whole).headers["retry-after"] == "2"
        *_, last, _ = (await streamed).text.split("\n\n")
    assert '"replica_gone"' in last, "the last event is the error"
    assert scene.streams.num_open == scene.service.admission.num_in_flight == 0
