"""Every client of somebody else's server against one hostile peer: whose fault it is, in time, and in words that name the server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dags.ray_jobs.client import ClusterAway, RayJobs
from pipelines.cluster.job_api import ClusterUnreachable, JobApi
from serve_apps.authoring.agent import AuthorError, ToolError, ToolFault
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.mcp_tools.mcp_server import McpServer
from serve_apps.extensions.mcp_tools.mcp_session import Session
from serve_apps.extensions.retrieval.retriever import HttpRetriever
from serve_apps.extensions.worlds.openenv import openenv_session, reach
from serve_apps.http.peer import AsyncPeer, Fault, Peer, PeerError, fault_of, pause_s, read_json
from serve_apps.worlds.seen import checked
from tests.serve_apps.http.hostile_peer import ANSWERS, PAGE, WAYS, HostilePeer, answer, hostile_peer, text_frame

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[3]
PEERS, ADDRESS, CALLER, REQUEST, NO_JSON = "peer", "address", "caller", "request", "no JSON"
FAULTS: dict[str, str] = {
    "cuts the body": PEERS,
    "hangs up": PEERS,
    "redirects": ADDRESS,
    "answers with a page": NO_JSON,
    "answers with a bomb": PEERS,
    "gives too short a length": NO_JSON,
    "names a wrong charset": NO_JSON,
    "answers too deep": NO_JSON,
    "is busy": PEERS,
    "is overloaded": PEERS,
    "refuses the caller": CALLER,
    "refuses the request": REQUEST,
    "has no such page": ADDRESS,
    "speaks no HTTP": ADDRESS,
    "stalls": PEERS,
    "drips": PEERS,
    "answers without end": PEERS,
    "sends a head without end": PEERS,
}


@pytest.fixture(autouse=True)
def _behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the proxy that everything else goes through: this machine is asked directly all the same."""
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")


def fault(ask: Callable[[], Any]) -> str:
    try:
        ask().json()
    except PeerError as error:
        return error.fault
    except ValueError:
        return NO_JSON
    return "none"


@pytest.mark.parametrize("way", WAYS)
def test_whose_fault_a_wrong_answer_is_and_that_it_takes_no_longer_than_it_may(way: str) -> None:
    async def in_a_loop(url: str) -> Any:
        peer = AsyncPeer([url], timeout_s=0.5)
        try:
            return await peer.ask("POST", url, json=[1])
        finally:
            await peer.close()

    began = time.monotonic()
    with hostile_peer(way) as server:
        assert fault(lambda: Peer(server.url, timeout_s=0.5).ask("POST", server.url, json=[1])) == FAULTS[way]
        assert fault(lambda: asyncio.run(in_a_loop(server.url))) == FAULTS[way]
        assert server.num_requests == 2, "nothing is repeated, and no redirect followed"
    assert time.monotonic() - began < 10


JOB_ERRORS = {
    PEERS: ClusterUnreachable,
    ADDRESS: ValueError,
    CALLER: ValueError,
    REQUEST: ValueError,
    NO_JSON: ValueError,
}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "answers without end"])  # a log may be long
def test_a_wrong_dashboard_is_one_of_the_config_or_one_that_is_away(way: str) -> None:
    with hostile_peer(way) as server, pytest.raises((ValueError, ClusterUnreachable), match=server.url) as raised:
        JobApi(server.url, timeout_s=0.5).jobs()
    assert type(raised.value) is JOB_ERRORS[FAULTS[way]]


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way not in ("answers without end", "has no such page", "stalls")]
)
def test_a_wrong_dashboard_of_a_ray_job_is_told_so(way: str) -> None:
    with hostile_peer(way) as server, pytest.raises((ValueError, ClusterAway), match=server.url):
        RayJobs(server.url).job("daily-count-a0")


def test_a_cluster_that_cannot_say_whether_it_has_a_package_is_not_taken_to_have_it() -> None:
    with hostile_peer("is overloaded") as server, pytest.raises(ClusterUnreachable, match="answered HTTP 503"):
        JobApi(server.url, timeout_s=0.5).upload("package.zip", b"zip")
    assert server.num_requests == 1, "nothing was sent"


def search(server: HostilePeer) -> Any:
    async def run() -> Any:
        retriever = HttpRetriever([server.url], max_attempts=2, timeout_s=0.5, deadline_s=5)
        try:
            return await retriever.search(["a"], 1)
        finally:
            await retriever.close()

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_retriever_is_a_fault_of_the_infrastructure_unless_it_refuses_the_queries(way: str) -> None:
    with hostile_peer(way) as server, pytest.raises(ToolError, match=server.url) as raised:
        search(server)
    assert isinstance(raised.value, ToolFault) is (FAULTS[way] != REQUEST)
    assert server.num_requests == (2 if FAULTS[way] in (PEERS, NO_JSON) else 1), "what cannot pass is not repeated"


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_mcp_server_is_a_fault_of_the_infrastructure(way: str) -> None:
    async def call(url: str) -> None:
        session = Session(McpServer(url=url, start_timeout_s=1))
        try:
            async with asyncio.timeout(8):
                await session.call("add", {})
        finally:
            session.close()

    with hostile_peer(way) as server, pytest.raises(ToolFault, match=f"the MCP server {server.url} did not start"):
        asyncio.run(call(server.url))


MAY_START = ("hangs up", "cuts the body", "speaks no HTTP", "is busy", "is overloaded")
"""What a server of websockets may do while it comes up: the connection ends within the head, or it says so."""


async def begun(environment: Environment) -> Any:
    async with openenv_session(environment) as world:
        return await world.reset({})


@pytest.mark.parametrize("ask", [reach, begun])
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_server_of_worlds_is_a_fault_of_the_infrastructure(
    way: str, ask: Callable[[Environment], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_apps.extensions.worlds.openenv.REACH_TIMEOUT_S", 0.7)
    with hostile_peer(way) as server, pytest.raises(ToolFault, match=server.url):
        asyncio.run(ask(Environment(url=server.url, reset_timeout_s=0.7, step_timeout_s=0.7)))
    is_repeated = ask is begun and way in MAY_START
    assert (server.num_requests > 1) is is_repeated, "asked again where it may be starting, and nowhere else"


@pytest.mark.parametrize(
    "text",
    [
        PAGE,
        b"[1]",
        b"7",
        b'{"data": [1]}',
        b'{"data": {"observation": "x"}}',
        b'{"data": {"observation": []}}',
        b'{"type": "error", "data": null}',
    ],
)
def test_what_is_no_answer_of_a_world_is_no_outcome_of_a_policy(text: bytes) -> None:
    with hostile_peer("", frames=text_frame(text)) as server, pytest.raises(AuthorError, match="no answer of a world"):
        asyncio.run(begun(Environment(url=server.url, reset_timeout_s=2, step_timeout_s=2)))


@pytest.mark.parametrize("field", [b'"done": "false"', b'"reward": ""'])
def test_a_text_is_neither_the_end_of_a_world_nor_a_reward(field: bytes) -> None:
    frames = text_frame(b'{"data": {"observation": {"text": "x"}, ' + field + b"}}")
    with hostile_peer("", frames=frames) as server:
        environment = Environment(url=server.url, reset_timeout_s=2, step_timeout_s=2)
        with pytest.raises(AuthorError, match="it must be"):
            checked(asyncio.run(begun(environment)), environment, before="")


@pytest.mark.parametrize("content", [b"[1]", b"7", b'[{"type": "SUBMISSION"}]'])
def test_json_that_is_no_answer_of_the_job_api_is_named_as_such(content: bytes) -> None:
    with hostile_peer("answers slowly", content=content) as server:
        api = JobApi(server.url, timeout_s=2)
        for ask in (
            api.jobs,
            lambda: api.job("a"),
            lambda: api.log("a"),
            lambda: api.submit({}),
            lambda: api.stop("a"),
        ):
            with pytest.raises(ValueError, match="answers, but not as Ray's job API"):
                ask()


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_gateway_is_named_by_the_model_that_mlflow_loads(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.stages import team_model

    monkeypatch.setattr(team_model, "ANSWER_S", 0.5)
    model: Any = SimpleNamespace(_team=SimpleNamespace(run_id="team"))
    with hostile_peer(way) as server, pytest.raises(RuntimeError, match=f"the gateway at {server.url}: "):
        team_model.TeamModel._ask(model, server.url, "2+2", 0)


def test_json_that_is_no_answer_of_a_gateway_is_named_as_such() -> None:
    from pipelines.stages.team_model import TeamModel

    model: Any = SimpleNamespace(_team=SimpleNamespace(run_id="team"))
    with hostile_peer("answers slowly", content=b"[1]") as server, pytest.raises(RuntimeError, match="is no run of a"):
        TeamModel._ask(model, server.url, "2+2", 0)


def test_a_server_that_closes_connections_without_a_word_is_asked_as_any_other() -> None:
    with hostile_peer("closes connections that it kept", content=b"[]") as server:
        api = JobApi(server.url)
        assert [api.jobs() for _ in range(3)] == [[], [], []]
    rows = json.dumps({"result": [["a"]]}).encode()
    with hostile_peer("closes connections that it kept", content=rows) as server:

        async def run() -> list[Any]:
            retriever = HttpRetriever([server.url], max_attempts=1, cache_size=0)
            found = []
            for _ in range(3):
                found += await retriever.search(["a"], 1)
                await asyncio.sleep(0.05)  # the end of the connection arrives before the next request
            await retriever.close()
            return found

        assert [row[0].contents for row in asyncio.run(run())] == ["a", "a", "a"]


@pytest.mark.parametrize("encoding", ["", "Identity", "utf-8", "GZIP", "identity, br"])
def test_only_packed_answers_are_refused_for_their_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "names an encoding", answer(b"[7]", more=f"Content-Encoding: {encoding}\r\n"))
    with hostile_peer("names an encoding") as server:
        found = fault(lambda: Peer(server.url, timeout_s=1).ask("GET", server.url))
    assert found == (PEERS if encoding in ("GZIP", "identity, br") else "none")


def test_json_may_begin_with_the_mark_of_utf_8() -> None:
    assert read_json(b"\xef\xbb\xbf[7]") == read_json("\ufeff[7]") == [7]


def test_a_sign_that_cannot_be_sent_is_a_fault_of_the_token_or_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile_peer("is busy") as server:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secr\N{LATIN SMALL LETTER A WITH DIAERESIS}t")
        with pytest.raises(ValueError, match=f"{server.url}: .* in a header, at 11 .*RAY_AUTH_TOKEN") as raised:
            JobApi(server.url).jobs()
        assert "secr" not in str(raised.value)
        assert fault(lambda: Peer(server.url, timeout_s=1).ask("POST", server.url, json="\ud800")) == REQUEST
        assert server.num_requests == 0


def test_a_log_may_take_longer_than_any_other_answer_but_be_no_longer_silent() -> None:
    content = json.dumps({"logs": "x" * 2000}).encode()
    with hostile_peer("answers slowly", content=content) as server:
        api = JobApi(server.url, timeout_s=1)
        assert api.log("job") == "x" * 2000
        with pytest.raises(ClusterUnreachable, match="timed out"):
            api.job("job")
    with hostile_peer("stalls") as server, pytest.raises(ClusterUnreachable, match="timed out"):
        JobApi(server.url, timeout_s=0.3).log("job")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "socks4://127.0.0.1:9"),
        ("HTTP_PROXY", " http://127.0.0.1:9 "),
        ("HTTP_PROXY", "http://me:secr#t@127.0.0.1:9"),
    ],
)
def test_a_proxy_that_cannot_be_asked_is_named_and_does_not_matter_to_this_machine(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.stages import team_model

    monkeypatch.setenv(variable, value)
    with hostile_peer("closes connections that it kept", content=b"[]") as server:
        assert JobApi(server.url).jobs() == []
    away = "http://ray.example.invalid:8265"
    retriever = HttpRetriever([away, "http://127.0.0.1:9"])
    model: Any = SimpleNamespace(_team=SimpleNamespace(run_id="team"))
    asked: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: JobApi(away)),
        (ToolFault, lambda: asyncio.run(retriever.search(["a"], 1))),
        (RuntimeError, lambda: team_model.TeamModel._ask(model, away, "2+2", 0)),
    ]
    for kind, ask in asked:
        with pytest.raises(kind, match=f"{away}.*: {variable} must be http://HOST:PORT") as raised:
            ask()
        assert "secr" not in str(raised.value)


def test_a_wish_to_be_asked_later_is_kept_to() -> None:
    busy = ANSWERS["is busy"].replace(b"Retry-After: 0", b"Retry-After: 7")
    ANSWERS["is busy for 7 s"] = busy
    try:
        with hostile_peer("is busy for 7 s") as server, pytest.raises(PeerError) as raised:
            Peer(server.url, timeout_s=1).ask("GET", server.url)
    finally:
        del ANSWERS["is busy for 7 s"]
    assert raised.value.retry_after_s == 7


def test_a_retriever_that_wishes_more_time_than_is_left_is_asked_after_its_own_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ANSWERS, "is busy for long", ANSWERS["is busy"].replace(b"After: 0", b"After: 60"))
    with hostile_peer("is busy for long") as server, pytest.raises(ToolFault, match="no documents after 2 attempts"):
        search(server)
    assert server.num_requests == 2


def test_statuses_and_pauses() -> None:
    faults: dict[int, Fault] = {400: "request", 401: "caller", 403: "caller", 404: "address", 301: "address"}
    assert {status: fault_of(status) for status in faults} == faults
    assert all(fault_of(status) == "peer" for status in (408, 425, 429, 500, 502, 503, 504))
    assert 0.1 <= pause_s(0, first_s=0.2, longest_s=5) <= 0.2
    assert 2.5 <= pause_s(10_000, first_s=0.2, longest_s=5) <= 5


def test_no_other_client_of_http_is_in_the_sources() -> None:
    clients = ("aiohttp", "http.client", "httpx", "httpx2", "requests", "urllib.request", "urllib3", "websockets")
    users = {
        str(file.relative_to(ROOT)): {
            name for name in clients if re.search(rf"^\s*(import|from) {re.escape(name)}\b", text, re.M)
        }
        for layer in ("dags", "pipelines", "serve_apps", "stores", "train_loops")
        for file in (ROOT / layer).rglob("*.py")
        if "pipelines/examples" not in str(file)
        for text in [file.read_text()]
    }
    assert {file: names for file, names in users.items() if names} == {
        "dags/ray_jobs/client.py": {"httpx"},  # a package of its own: Airflow brings this client
        "serve_apps/http/peer.py": {"httpx2"},
        "serve_apps/extensions/episodes/episode_api.py": {"httpx2"},  # passes answers on as they come
        "serve_apps/extensions/mcp_tools/mcp_session.py": {"httpx2"},  # a timeout, for the client that MCP is given
        "serve_apps/extensions/worlds/openenv.py": {"websockets"},
    }
