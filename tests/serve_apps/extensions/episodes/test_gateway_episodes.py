"""External programs that run an episode on the gateway: unchanged, with the official client, until they post an outcome."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_scene import Engine, Scene, deployed_team, keys_file
from waits import until

from pipelines.credit.math_final_answer import MathFinalAnswer
from pipelines.credit.rule import caller_credit
from pipelines.examples.calculator import program as calculator
from serve_apps.gateway.http.connections import make_server
from serve_apps.gateway.traffic.callers import make_key
from serve_apps.gateway.traffic.peer_replicas import Status
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute, TeamStores
from serve_apps.policy.client import PolicyCallError
from stores.traces.served import ServedStore
from stores.types import SERVED, EpisodeStatus, Sampling, Trace

pytestmark = [pytest.mark.test, pytest.mark.anyio]
MULTIPLY = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*8"}}</tool_call>'
ADD = '<tool_call>{"arguments": {"expression":   "7+48"},   "name": "calculate"}</tool_call>'
PROGRAM: dict[str, Any] = {
    "agents": {"calculator": {"max_tokens": 120}},
    "function": "pipelines.examples.calculator.program:answer",
}


def program_team(model: Path, version: int, set_name: str) -> DeployedTeam:
    made = deployed_team(model, version, set_name)
    changes: dict[str, Any] = {
        "workflow": "serve_apps.workflows.program:Program",
        "settings": PROGRAM,
        "group_of": {"calculator": "shared"},
        "max_model_len": {"shared": 1024},
        "sampling": {"calculator": {"max_tokens": 120, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}},
    }
    return made.model_copy(update={"team_spec": made.team_spec | changes})


class Stage:
    """A gateway that serves the calculator and captures answers, with a scripted engine."""

    def __init__(self, model: Path, folder: Path, *says: str, **settings: Any) -> None:
        capture = {"share": 1.0, "flush_s": 0.05, **settings.pop("capture", {})}
        self.scene = Scene(model, capture=capture, **settings)
        self.stores = TeamStores(run_id="demo", traces=str(folder / "traces"), served=str(folder / "served"))
        self.model, self.store = model, ServedStore(self.stores.served)
        self.engine = Engine(self.scene, *says)
        self.scene.service.client = lambda team: self.engine  # type: ignore[assignment, method-assign, return-value]
        self.put(3, "blue")

    def put(self, version: int, set_name: str, **more: Any) -> None:
        self.scene.serve(TeamRoute(champion=program_team(self.model, version, set_name), stores=self.stores, **more))

    @asynccontextmanager
    async def opened(self, key: str = "", **body: Any) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
        async with self.scene.http(key) as http:
            answer = await http.post("/v1/episodes", json={"team": "demo", "store": True, **body})
            assert answer.status_code == 200, answer.text
            yield http, answer.json()

    async def kept(self) -> list[Trace]:
        await self.scene.service.capture.close()
        return self.store.find_traces()


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> Stage:
    return Stage(tiny_model, tmp_path, MULTIPLY, ADD, "55")


def client_of(http: httpx.AsyncClient, base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url=f"http://gateway{base_url}",
        http_client=http,
        max_retries=0,
        default_headers=http.headers,
    )


def chat(http: httpx.AsyncClient, episode: dict[str, Any], *, text: str = "x", **more: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return http.post(f"{episode['base_url']}/chat/completions", json=body)


@pytest.mark.parametrize("by_path", [False, True])
async def test_an_unchanged_external_program_runs_an_episode_that_is_stored_token_exact_with_its_score(
    stage: Stage, by_path: bool
) -> None:
    async with stage.opened(prompt="7+6*8", metadata={"level": 2}) as (http, episode):
        url = episode["agents"]["calculator"] if by_path else episode["base_url"]
        answer = await calculator.answer("7+6*8", client_of(http, url))
        reply = (await http.post(f"{episode['base_url']}/outcome", json={"answer": answer, "score": 0.75})).json()
    assert answer == "55" and episode["troupe"]["team_version"] == 3
    assert (reply["status"], reply["num_turns"], reply["capture"]) == ("ok", 3, "kept")
    (trace,) = await stage.kept()
    assert trace.episode_id == episode["id"] == reply["id"]
    assert (trace.answer, trace.task.prompt, trace.task.metadata) == ("55", "7+6*8", {"level": 2})
    assert [t.completion_text for t in trace.turns] == [MULTIPLY, ADD, "55"]
    for before, after in zip(trace.turns, trace.turns[1:], strict=False):
        whole = [*before.prompt_token_ids, *before.completion_token_ids]
        assert list(after.prompt_token_ids[: len(whole)]) == whole, "training merges these turns into one row"
    assert [(c.tool, c.response) for c in trace.tool_calls] == [("calculate", "48"), ("calculate", "55")]
    assert {(t.policy_version, t.sampling) for t in trace.turns} == {(3, Sampling(max_tokens=120))}
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 2}} == reply["conversations"]
    about = trace.outcome_metadata[SERVED]
    assert (about["team_version"], about["key"], about["is_trainable"]) == (3, "anyone", True)
    ((_, feedback),) = stage.store.judged(since=0)
    assert feedback.score == 0.5 and caller_credit(MathFinalAnswer(), trace, feedback.score).outcome == 0.75, (
        "what was posted"
    )


async def test_streams_and_headers_agree_with_whole_replies(stage: Stage) -> None:
    stage.engine.left = ["It is 42."]
    async with stage.opened() as (http, episode):
        client = client_of(http, episode["base_url"])
        assert [m.id async for m in client.models.list()] == ["calculator"]
        raw = await client.chat.completions.with_raw_response.create(
            model="gpt-4o",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in raw.parse()]
    assert raw.headers["x-troupe-team"] == "demo@3" and raw.headers["x-request-id"] == episode["id"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 42."
    assert {c.system_fingerprint for c in chunks} == {"demo@3"} and chunks[-1].usage


class Listed:
    """PeerReplicas with one list."""

    def __init__(self, *statuses: Status) -> None:
        self._statuses = list(statuses)

    async def statuses(self) -> list[Status]:
        return self._statuses


@asynccontextmanager
async def listening(scene: Scene) -> AsyncIterator[str]:
    """Lets a gateway listen on a port of this machine, and names its address."""
    server = make_server(scene.api, scene.service.config)
    with socket.create_server(("127.0.0.1", 0)) as at:
        serving = asyncio.create_task(server.serve(sockets=[at]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{at.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_call_through_another_replica_is_the_callers_own(tiny_model: Path, tmp_path: Path, header: str) -> None:
    secret, key = make_key("app", requests_per_minute=9)
    keys = keys_file(tmp_path, key)
    owner = Stage(tiny_model, tmp_path, "55", keys_file=keys)
    async with listening(owner.scene) as address, owner.opened(secret) as (_, episode):
        peers = Listed({"replica": owner.scene.service.replica, "address": address})
        async with Scene(tiny_model, peers=peers, keys_file=keys).http() as http:
            http.headers[header] = f"Bearer {secret}" if header == "Authorization" else secret
            answer = await chat(http, episode)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "55"
    told = [answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")]
    assert told == ["9", "7"], "the owner counts the call, after the one that opened the episode"


async def test_a_page_reaches_no_team_through_another_replica_that_does_not_let_it_in(
    tiny_model: Path, tmp_path: Path
) -> None:
    secret, key = make_key("app")
    owner = Scene(tiny_model)
    async with listening(owner) as address:
        other = Scene(tiny_model, peers=Listed({"replica": owner.service.replica, "address": address}))
        settings: dict[str, Any] = {"keys_file": keys_file(tmp_path, key)}
        closed, open_to_pages = (
            TeamRoute.model_validate({"champion": program_team(tiny_model, 3, "blue"), "settings": settings | more})
            for more in ({}, {"allowed_origins": ["*"]})
        )
        for scene in (owner, other):
            scene.share({"closed": closed, "pages": open_to_pages})
        for scene in (owner, other):
            statuses = []
            for team in ("closed", "pages"):
                async with owner.http(secret) as http:
                    url = (await http.post("/v1/episodes", json={"team": team})).json()["base_url"]
                async with scene.http(secret) as http:
                    for headers in ({}, {"Origin": "https://x.example"}, {"Origin": "http://gateway"}):
                        statuses.append((await http.get(f"{url}/models", headers=headers)).status_code)
            assert statuses == [200, 404, 200, 200, 200, 200], "a team that lets no page in is not there for it"
        await owner.api.state.episodes.close()


async def test_an_episode_is_not_stored_without_consent_of_the_episode_and_of_each_call(stage: Stage) -> None:
    for opening, call in (({"store": None}, {}), ({}, {"store": False})):
        async with stage.opened(**opening) as (http, episode):
            await chat(http, episode, **call)
            reply = (await http.post(f"{episode['base_url']}/outcome", json={"score": 1})).json()
            assert reply["capture"] == "not_kept"
    await stage.scene.service.capture.close()
    assert not Path(stage.stores.served).exists()


async def test_an_episode_stays_on_its_team_through_a_switch_and_ends_when_its_set_may_be_loaded_anew(
    stage: Stage,
) -> None:
    async with stage.opened() as (http, first):
        stage.put(4, "green", previous=program_team(stage.model, 3, "blue"))
        answer = (await chat(http, first)).json()
        assert answer["system_fingerprint"] == "demo@3" and answer["troupe"]["policy_versions"] == {"shared": 3}
        async with stage.opened() as (_, second):
            assert second["troupe"]["team_version"] == 4
        stage.put(5, "blue", previous=program_team(stage.model, 4, "green"))
        gone = await chat(http, first)
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "team_gone")
        assert "demo@3, on which this episode began, is not loaded any more (champion now: demo@5)" in gone.text
        later = await http.post(f"{first['base_url']}/outcome", json={"score": 1})
        assert (later.status_code, later.json()["error"]["code"]) == (410, "episode_ended")
        assert len(stage.engine.seen) == 1, "no call reached the set of another team"
        stage.engine.version = 4
        assert (await chat(http, second)).json()["system_fingerprint"] == "demo@4", (
            "its set stays loaded for going back"
        )
    assert stage.scene.service.in_flight() == [] and stage.scene.service.admission.num_in_flight == 0
    traces = {trace.episode_id: trace for trace in await stage.kept()}
    assert traces[first["id"]].status == EpisodeStatus.INFRA_ERROR and len(traces[first["id"]].turns) == 1


async def test_an_outcome_counts_even_if_the_set_was_loaded_anew_since_the_last_call(stage: Stage) -> None:
    async with stage.opened() as (http, episode):
        await chat(http, episode)
        stage.put(5, "blue")
        reply = (await http.post(f"{episode['base_url']}/outcome", json={"score": 1})).json()
    assert (reply["status"], reply["capture"], reply["troupe"]["team_version"]) == ("ok", "kept", 3)


async def test_an_open_episode_takes_no_slot_and_a_call_does(stage: Stage) -> None:
    async with stage.opened() as (http, episode):
        assert stage.scene.service.in_flight() == [] and stage.scene.service.status()["num_episodes"] == 1
        stage.engine.pause.clear()
        call = asyncio.ensure_future(chat(http, episode))
        await until(lambda: stage.engine.seen)
        assert [f["num"] for f in stage.scene.service.in_flight()] == [1]
        early = await http.post(f"{episode['base_url']}/outcome", json={"score": 1})
        assert (early.status_code, early.json()["error"]["code"]) == (409, "calls_in_flight")
        stage.engine.pause.set()
        assert (await call).status_code == 200
        assert stage.scene.service.in_flight() == []


async def test_an_episode_without_calls_ends_as_a_timeout_and_is_stored(tiny_model: Path, tmp_path: Path) -> None:
    stage = Stage(tiny_model, tmp_path, "hm", episodes={"idle_s": 0.3})
    async with stage.opened() as (http, episode):
        await chat(http, episode)
        await until(lambda: not stage.scene.service.num_episodes)
        late = await http.post(f"{episode['base_url']}/outcome", json={"score": 1})
        assert late.status_code == 410 and "has ended: timeout, no call for 0.3 s" in late.text
        metrics = (await http.get("/metrics")).text
    assert 'troupe_gateway_episodes_total{status="timeout",team="demo",version="3"} 1.0' in metrics
    (trace,) = await stage.kept()
    assert (trace.status, len(trace.turns)) == (EpisodeStatus.TIMEOUT, 1) and stage.store.feedback_on() == []


async def test_calls_beyond_the_limits_are_refused_and_the_episode_counts_as_truncated(
    tiny_model: Path, tmp_path: Path
) -> None:
    stage = Stage(tiny_model, tmp_path, episodes={"max_open": 1, "max_turns": 2}, max_body_bytes=2000)
    async with stage.opened() as (http, episode):
        full = await http.post("/v1/episodes", json={"team": "demo"})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_episodes")
        assert full.headers["Retry-After"]
        answers = [await chat(http, episode) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 400] and "at most 2 turns" in answers[2].text
        assert (await chat(http, episode, text="x" * 3000)).status_code == 413
        reply = (await http.post(f"{episode['base_url']}/outcome", json={"score": 1})).json()
        assert (reply["status"], reply["stop_reason"], reply["num_turns"]) == ("truncated", "turn_limit", 2)
        assert (await http.post("/v1/episodes", json={"team": "demo"})).status_code == 200, "there is room again"
        assert (await http.post("/v1/episodes", json={"team": "nobody"})).status_code == 404
        assert (await http.post("/v1/episodes", json={"team": "demo", "n": 1})).status_code == 400


async def test_another_key_finds_no_episode_but_a_grader_with_scope_admin_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    scopes = {"web": ("call",), "app": ("call",), "grader": ("admin",), "judge": ("feedback",)}
    keys = {
        name: make_key(name, scopes=of, requests_per_minute=4 if name == "app" else None)  # type: ignore[arg-type]
        for name, of in scopes.items()
    }
    stage = Stage(tiny_model, tmp_path, keys_file=keys_file(tmp_path, *(key for _, key in keys.values())))
    async with stage.opened(keys["web"][0]) as (http, episode):
        assert (await chat(http, episode)).status_code == 200
        codes = []
        for name in ("app", "judge", "grader"):
            async with stage.scene.http(keys[name][0]) as other:
                answer = await other.post(f"{episode['base_url']}/outcome", json={"score": 1})
                codes.append(answer.status_code)
        assert codes == [404, 403, 200]
        async with stage.scene.http() as nobody:
            assert (await chat(nobody, episode)).status_code == 401
        async with stage.scene.http(keys["app"][0]) as app:
            unknown = [await chat(app, {"base_url": "/v1/episodes/ep-none-1"}) for _ in range(4)]
        assert [a.status_code for a in unknown] == [404, 404, 404, 429], "calls of episodes count for a key's rate"
    (trace,) = await stage.kept()
    assert trace.outcome_metadata[SERVED]["key"] == "web"


async def test_engines_that_fail_end_the_episode_and_are_no_fault_of_the_program(stage: Stage) -> None:
    async with stage.opened() as (http, episode):
        stage.engine.error = PolicyCallError("no replica")
        assert (await chat(http, episode)).status_code == 503
        gone = await chat(http, episode)
        assert gone.status_code == 410 and "infra_error" in gone.text
    (figures,) = stage.scene.service.figures()
    assert figures["sums"]["failure_share"][1] == 1.0
    (trace,) = await stage.kept()
    assert (trace.status, trace.error) == (EpisodeStatus.INFRA_ERROR, "no replica")


async def test_a_replica_that_stops_stores_its_open_episodes(stage: Stage) -> None:
    async with stage.opened() as (http, episode):
        await chat(http, episode)
        await stage.scene.api.state.episodes.close()
    (trace,) = await stage.kept()
    assert trace.status == EpisodeStatus.INFRA_ERROR and "was stopped" in trace.error
    assert trace.task.prompt == "x", "what was asked stands for a task that was not given"
    assert stage.store.feedback_on() == [], "no score, no feedback"


async def test_answers_are_counted_by_team_and_key_and_no_text_leaks(stage: Stage) -> None:
    stage.engine.left = ["a secret"]
    async with stage.opened(prompt="the question") as (http, episode):
        await chat(http, episode, text="the question")
        reply = await http.post(f"{episode['base_url']}/outcome", json={"answer": "a secret"})
        metrics = (await http.get("/metrics")).text
    assert 'troupe_gateway_answers_total{key="anyone",team="demo",version="3"} 1.0' in metrics
    assert "secret" not in reply.text + metrics and "question" not in reply.text + metrics
    (figures,) = stage.scene.service.figures()
    assert figures["sums"]["failure_share"][:2] == [1, 0.0] and figures["sums"]["latency_s"][0] == 1


async def test_the_agents_of_any_workflow_are_called_by_their_names(tiny_model: Path, tmp_path: Path) -> None:
    stage = Stage(tiny_model, tmp_path, "a", "b")
    stage.scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue"), stores=stage.stores))
    async with stage.opened() as (http, episode):
        assert set(episode["agents"]) == {"solver", "verifier", "refiner", "finalizer"}
        assert (await chat(http, episode, model="solver")).status_code == 200
        nobody = await chat(http, episode, model="gpt-4o")
        assert nobody.status_code == 404 and "agents are solver" in nobody.text
        assert json.loads(nobody.text)["error"]["code"] == "agent_not_found"


async def test_invalid_calls_never_end_an_episode_as_an_infrastructure_failure(stage: Stage) -> None:
    """Half a character in a tool or a text, the answer to a tool call that nobody made, several choices."""
    function = {"name": "f", "parameters": {"type": "object", "half": "\ud800"}}
    bad: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": function}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "never-asked"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"n": 2},
    ]
    stage.engine.left = ["a"] * 9
    async with stage.opened() as (http, episode):
        statuses = []
        for more in bad:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **more})
            url = f"{episode['base_url']}/chat/completions"
            answer = await http.post(url, content=body, headers={"Content-Type": "application/json"})
            statuses.append(answer.status_code)
        assert statuses == [400, 200, 400, 400]
        assert (await chat(http, episode)).status_code == 200


async def test_of_two_outcomes_at_once_the_first_counts_and_a_later_call_is_refused(stage: Stage) -> None:
    async with stage.opened() as (http, episode):
        await chat(http, episode)
        outcome_url = f"{episode['base_url']}/outcome"
        first, second, late = await asyncio.gather(
            http.post(outcome_url, json={"answer": "right", "score": 1.0}),
            http.post(outcome_url, json={"answer": "wrong", "score": 0.0}),
            chat(http, episode),
        )
    assert [answer.status_code for answer in (first, second, late)] == [200, 410, 410]
    assert late.json()["error"]["code"] == "episode_ended" and len(stage.engine.seen) == 1
    (trace,) = await stage.kept()
    assert (trace.answer, trace.outcome_metadata["score"]) == ("right", 1.0)
    assert [feedback.score for feedback in stage.store.feedback_on()] == [1.0]
    assert stage.scene.service.in_flight() == []
