"""The API of the dashboard: status, stored traces, one task under two teams; and the page's own files."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dashboard_scene import HOSTILE, fill, make_episode, reward_of, team_route
from gateway_scene import Scene, keys_file
from waits import until

from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.extensions.dashboard import trace_reader
from serve_apps.gateway.traffic.callers import make_key
from stores.traces.store import TraceStore
from stores.types import Purpose, Trace

pytestmark = [pytest.mark.test, pytest.mark.anyio]


@pytest.fixture(scope="module")
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trace]]:
    """A folder with a run's store, and the traces in it."""
    folder = tmp_path_factory.mktemp("stored")
    return folder, fill(folder, tiny_model)


@pytest.fixture
def scene(tiny_model: Path, stored: tuple[Path, list[Trace]]) -> Scene:
    scene = Scene(tiny_model)
    scene.serve(team_route(tiny_model, stored[0]))
    return scene


async def ask(scene: Scene, path: str, expected: int = 200, /, **params: Any) -> Any:
    async with scene.http() as client:
        answer = await client.get(f"/v1/admin/{path}", params=params)
    assert answer.status_code == expected, answer.text
    return answer.json()


async def test_status_has_deployed_teams_shares_versions_and_figures_per_answer(scene: Scene) -> None:
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": [{"role": "user", "content": "secret"}]}
        for _ in range(8):
            await client.post("/v1/chat/completions", json=body)
    status = await ask(scene, "status")
    (team,) = status["teams"]
    assert (team["name"], team["share"], team["shadow"], team["run_id"]) == ("demo", 0.25, 0.5, "math")
    deployed = {team_status["alias"]: team_status for team_status in team["deployed"]}
    assert {name: team_status["team_version"] for name, team_status in deployed.items()} == {
        "champion": 3,
        "candidate": 4,
        "previous": 2,
    }
    assert deployed["candidate"]["policy_versions"] == {"worker": 9, "judge": 5}
    figures = deployed["champion"]["figures"]
    num = figures["failure_share"]["num"]
    assert 0 < num <= 8 and figures["failure_share"] == {"num": num, "mean": 0.0, "standard_error": 0.0}
    assert figures["completion_tokens"]["mean"] > 1 and "format_share" not in figures
    assert status["in_flight"] == status["waiting"] == 0 and "secret" not in str(status)


async def test_status_covers_all_replicas_that_answer(tiny_model: Path, stored: tuple[Path, list[Trace]]) -> None:
    scenes = [Scene(tiny_model), Scene(tiny_model)]
    for scene, num in zip(scenes, (1, 4), strict=True):
        scene.serve(team_route(tiny_model, stored[0]).model_copy(update={"candidate": None, "shadow": 0.0}))
        async with scene.http() as client:
            for _ in range(num):
                body = {"model": "demo/solver", "messages": [{"role": "user", "content": "x"}]}
                await client.post("/v1/chat/completions", json=body)
            await client.post("/v1/episodes", json={"team": "demo"})
    scenes[0].service.peers = Replicas(*scenes)
    joint, alone = await ask(scenes[0], "status"), await ask(scenes[1], "status")
    for reply, num in ((joint, 2), (alone, 1)):
        assert (len(reply["replicas"]), reply["episodes"], reply["max_in_flight"]) == (num, num, 64 * num)
    counts = [of["teams"][0]["deployed"][0]["figures"]["failure_share"]["num"] for of in (joint, alone)]
    assert counts == [5, 4]


class Replicas:
    """PeerReplicas in this process."""

    def __init__(self, *scenes: Scene) -> None:
        self.scenes = scenes

    async def statuses(self) -> list[dict[str, Any]]:
        return [scene.service.status() for scene in self.scenes]


async def test_traces_are_listed_newest_first_page_by_page_without_their_turns(
    scene: Scene, stored: tuple[Path, list[Trace]]
) -> None:
    ids: list[str] = []
    before = ""
    while before is not None:
        page = await ask(scene, "teams/demo/traces", limit=10, before=before)
        ids += [row["episode_id"] for row in page["data"]]
        before = page["next"]
    expected = sorted(stored[1], key=lambda t: (-t.started_at, t.episode_id))
    assert ids == [trace.episode_id for trace in expected]
    row = page["data"][-1]
    assert "turns" not in row and row["agents"] == ["solver", "verifier", "refiner", "finalizer"]
    assert row["outcomes"].keys() == {"outcome-1"} and row["alias"] in ("champion", "candidate")


async def test_filters_combine_and_an_unwritten_store_is_empty(scene: Scene) -> None:
    gate = await ask(scene, "teams/demo/traces", purpose="gate", iteration=6, task="sum-1", status="ok")
    assert len(gate["data"]) == 4 and gate["next"] is None
    assert (await ask(scene, "teams/demo/traces", iteration=7))["data"] == []
    assert (await ask(scene, "teams/demo/traces", task="it's ; DROP --"))["data"] == []
    assert (await ask(scene, "teams/demo/traces", store="served"))["data"] == []


async def test_a_trace_has_every_token_as_text_with_its_logprob(scene: Scene, stored: tuple[Path, list[Trace]]) -> None:
    trace = stored[1][0]
    reply = await ask(scene, f"teams/demo/traces/{trace.episode_id}")
    assert reply["task"]["prompt"] == trace.task.prompt and reply["alias"] == "champion"
    for turn, row in zip(trace.turns, reply["turns"], strict=True):
        assert "".join(text for text, _ in row["tokens"]) == turn.completion_text + "<|im_end|>"
        assert [logprob for _, logprob in row["tokens"]] == pytest.approx(turn.rollout_logprobs, abs=1e-6)
        assert row["parents"] == list(turn.parents)
        assert row["option_logprobs"] == turn.option_logprobs
    assert reply["tool_calls"][0]["response"]["note"] == HOSTILE
    advantages = [turn["advantages"] for turn in reply["turns"]]
    assert len(advantages[0]) == len(trace.turns[0].completion_token_ids) and advantages[1:] == [None, 0.25, None]
    (credit,) = reply["rewards"]
    assert credit["turns"][0]["breakdown"].keys() == {"correct", "format"}
    assert (await ask(scene, f"teams/demo/traces/{trace.episode_id[:12]}"))["episode_id"] == trace.episode_id


async def test_the_episodes_of_one_task_are_grouped_by_team(scene: Scene) -> None:
    reply = await ask(scene, "teams/demo/tasks/sum-2", purpose="gate")
    assert [(team["alias"], len(team["episodes"])) for team in reply["teams"]] == [("candidate", 2), ("champion", 2)]
    assert {e["task_id"] for team in reply["teams"] for e in team["episodes"]} == {"sum-2"}


@pytest.mark.parametrize(
    ("path", "params", "status", "code"),
    [
        ("teams/nobody/traces", {}, 404, "team_not_found"),
        ("teams/demo/traces/none", {}, 404, "trace_not_found"),
        ("teams/demo/traces/none", {"store": "served"}, 404, "trace_not_found"),
        ("teams/demo/tasks/a/b", {}, 404, "task_not_found"),
        ("teams/demo/traces", {"before": "none"}, 400, "invalid_value"),
        ("teams/demo/traces", {"limit": 1000}, 400, "invalid_value"),
        ("teams/demo/traces", {"purpose": "fun"}, 400, "invalid_value"),
        ("teams/demo/traces", {"store": "attic"}, 400, "invalid_value"),
        ("teams/demo/traces", {"iteration": 2**40}, 400, "invalid_value"),
    ],
)
async def test_unknown_ids_and_invalid_parameters_are_errors_in_openais_form(
    scene: Scene, path: str, params: Any, status: int, code: str
) -> None:
    error = (await ask(scene, path, status, **params))["error"]
    assert error["code"] == code and error["message"]


async def test_values_that_json_cannot_hold_become_null(scene: Scene, stored: tuple[Path, list[Trace]]) -> None:
    tokenizer = load_tokenizer(str(scene.model))
    odd = make_episode(tokenizer, 50, team=3, purpose=Purpose.TEST)
    turn = replace(odd.turns[0], rollout_logprobs=(-math.inf, *odd.turns[0].rollout_logprobs[1:]))
    odd = replace(odd, turns=(turn,), outcome_metadata={"nan": math.nan, "half": "\ud83d"})
    store = TraceStore(str(stored[0] / "traces"))
    store.write_episodes([odd])
    store.write_rewards([replace(reward_of(odd), outcome=math.nan)])
    reply = await ask(scene, f"teams/demo/traces/{odd.episode_id}")
    assert reply["turns"][0]["tokens"][0][1] is None and reply["outcome_metadata"]["nan"] is None
    (row,) = (await ask(scene, "teams/demo/traces", purpose="test"))["data"]
    assert row["outcomes"] == {"outcome-1": None}


async def test_only_admin_keys_may_read_and_the_page_itself_needs_no_key(tiny_model: Path, tmp_path: Path) -> None:
    caller, kept_caller = make_key("web")
    admin, kept_admin = make_key("ops", scopes=("admin",))
    scene = Scene(tiny_model, keys_file=keys_file(tmp_path, kept_caller, kept_admin))
    for path in ("status", "teams/demo/traces", "teams/demo/traces/x", "teams/demo/tasks/x"):
        statuses = []
        for key in ("", caller, admin):
            async with scene.http(key) as client:
                statuses.append((await client.get(f"/v1/admin/{path}")).status_code)
        assert statuses[:2] == [401, 403] and statuses[2] in (200, 404)
    async with scene.http() as client:
        page = await client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "'unsafe" not in page.headers["content-security-policy"] and "<script>" not in page.text
        assert (await client.get("/", headers={"If-None-Match": page.headers["etag"]})).status_code == 304
        assert (await client.get("/assets/main.js")).headers["content-type"].startswith("text/javascript")
        for path in ("/assets/none.js", "/assets/..%2Fproduction.py", "/assets/__init__.py"):
            assert (await client.get(path)).status_code == 404


async def test_slow_reads_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    reader = trace_reader.TraceReader()
    monkeypatch.setattr(trace_reader, "READ_TIMEOUT_S", 0.05)
    open_again = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> dict[str, Any]:
        asyncio.run_coroutine_threadsafe(open_again.wait(), loop).result()
        return {}

    hung = await asyncio.gather(*(reader.read(hang) for _ in range(trace_reader.MAX_READS)), return_exceptions=True)
    assert {getattr(e, "status", None) for e in hung} == {504}
    with pytest.raises(trace_reader.ApiError, match="too many traces are being read"):
        await reader.read(dict)
    open_again.set()
    await until(lambda: not reader._num_reads)
    assert await reader.read(dict) == b"{}"


async def test_a_damaged_store_is_named_and_only_its_reader_gets_an_error(tiny_model: Path, tmp_path: Path) -> None:
    traces = fill(tmp_path, tiny_model)
    for file in (tmp_path / "traces").glob("episodes.*.lance/data/*"):
        file.write_bytes(file.read_bytes()[:100])
    scene = Scene(tiny_model)
    scene.serve(team_route(tiny_model, tmp_path))
    for path in ("teams/demo/traces", f"teams/demo/traces/{traces[0].episode_id}"):
        error = (await ask(scene, path, 503))["error"]
        assert error["code"] == "store_unreadable" and "table episodes." in error["message"]
        assert "is damaged" in error["message"] and "put a copy of" in error["message"]
    await ask(scene, "status")
