"""Captured answers and feedback on them: through the gateway's API, on real LanceDB."""

from __future__ import annotations

import asyncio
import json
import time
from collections import namedtuple
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_scene import Scene, deployed_team, keys_file
from records import MakeTrace
from waits import until, wait_until

from serve_apps.config import CaptureConfig
from serve_apps.engines.port import Piece
from serve_apps.gateway.traffic.callers import ApiKey, make_key
from serve_apps.gateway.traffic.capture import BATCH_CHARACTERS, Capture
from serve_apps.gateway.traffic.redaction import NOT_READ, Redaction
from serve_apps.gateway.traffic.teams import TeamRoute, TeamStores
from stores.traces import served
from stores.traces.served import Feedback, ServedStore
from stores.traces.upkeep import age
from stores.types import SERVED, GenerateRequest, Sampling, Trace

pytestmark = [pytest.mark.test, pytest.mark.anyio]
HELLO = {
    "model": "demo/solver",
    "messages": [{"role": "user", "content": "Write to ann@example.org"}],
    "temperature": 1,
}


def scene_of(model: Path, folder: Path, *, shadow: float = 0.0, **capture: Any) -> tuple[Scene, ServedStore]:
    scene = Scene(model, capture={"share": 1.0, "flush_s": 0.05, **capture})
    stores = TeamStores(run_id="demo", traces=str(folder / "traces"), served=str(folder / "served"))
    candidate = deployed_team(model, 4, "green") if shadow else None
    scene.serve(TeamRoute(champion=deployed_team(model, 3, "blue"), candidate=candidate, shadow=shadow, stores=stores))
    return scene, ServedStore(stores.served)


async def ask(http: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={**HELLO, **more})
    assert answer.status_code == 200, answer.text
    return answer.json() if not more.get("stream") else json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))


def kept(store: ServedStore) -> list[Trace]:
    return store.find_traces()


async def test_an_answer_with_consent_is_stored_token_exact(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        answer = await ask(http, store=True)
        streamed = await ask(http, store=True, stream=True)
        await ask(http)
    await scene.service.capture.close()
    traces = {trace.episode_id: trace for trace in kept(store)}
    assert traces.keys() == {answer["id"], streamed["id"]}
    (turn,) = traces[answer["id"]].turns
    assert (turn.agent, turn.model_group, turn.policy_version) == ("solver", "shared", 3)
    assert list(turn.prompt_token_ids) == scene.streams.requests[0].prompt_token_ids
    assert list(turn.completion_token_ids) == [
        *scene.streams.tokenizer.encode("It is 42."),
        scene.streams.tokenizer.eos_id,
    ]
    assert set(turn.rollout_logprobs) == {-0.5}
    assert turn.seed == scene.streams.requests[0].seed
    assert turn.completion_text == "It is 42."
    about = traces[answer["id"]].outcome_metadata[SERVED]
    assert about == {"team": "demo", "team_version": 3, "alias": "champion", "key": "anyone", "is_trainable": True}


async def test_an_answer_during_which_the_weights_changed_is_stored_as_such(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    whole = scene.streams.stream

    async def changing(app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        number = 0
        async for piece in whole(app, request):
            number += 1
            mixed = {"policy_version": 4} if number > 1 else {"is_version_mixed": not request.is_streamed}
            yield piece._replace(**mixed)

    async with scene.http() as http:
        scene.streams.stream = changing
        mixed = {(await ask(http, store=True, stream=is_streamed))["id"] for is_streamed in (True, False)}
        scene.streams.stream = whole
        await ask(http, store=True)
    await scene.service.capture.close()
    traces = kept(store)
    assert len(traces) == 3
    assert {trace.episode_id for trace in traces if trace.is_version_mixed} == mixed
    assert {trace.episode_id for trace in traces if trace.turns[0].is_version_mixed} == mixed


async def test_answers_without_consent_are_not_stored(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path, consent="given")
    async with scene.http() as http:
        await ask(http, store=False)
        agreed = await ask(http)
    await scene.service.capture.close()
    assert [trace.episode_id for trace in kept(store)] == [agreed["id"]]


def test_only_the_configured_share_of_answers_is_stored_whatever_the_callers_rhythm() -> None:
    capture = Capture(CaptureConfig(share=0.5), None, count=lambda *_: None)
    taken = [capture.should_keep(True) for _ in range(400)]
    assert 60 < sum(taken[::2]) < 140 and 60 < sum(taken[1::2]) < 140
    assert not any(Capture(CaptureConfig(), None, count=lambda *_: None).should_keep(True) for _ in range(100))


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_old_answers_go_although_no_new_one_is_stored(
    tiny_model: Path, tmp_path: Path, make_trace: MakeTrace, share: float
) -> None:
    store = ServedStore(str(tmp_path / "served"))
    store.create()
    store.write_episodes([make_trace(started_at=time.time() - 3 * 86_400)])
    scene, _ = scene_of(tiny_model, tmp_path, share=share, keep_days=1)
    await scene.service.capture.close()
    assert not kept(store)


async def test_a_team_without_a_store_gets_none_by_the_search_for_old_answers(tiny_model: Path, tmp_path: Path) -> None:
    scene, _ = scene_of(tiny_model, tmp_path, keep_days=1)
    await asyncio.sleep(0.3)
    await scene.service.capture.close()
    assert not (tmp_path / "served").exists()


class Silent:
    """Of a class that somebody wrote."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


@pytest.mark.parametrize("outcome", [{(1, 2): "a"}, {"a": Silent()}, {"a": namedtuple("Point", "x y")(1, 2)}])
async def test_an_outcome_that_is_no_json_fails_no_request_and_stops_no_writer(
    tiny_model: Path, tmp_path: Path, make_trace: MakeTrace, outcome: dict[Any, Any]
) -> None:
    scene, store = scene_of(tiny_model, tmp_path, redact={"nowhere": "x"})
    team, capture, (_, key) = scene.service.teams["demo"].champion, scene.service.capture, make_key("caller")
    odd = make_trace(0, started_at=time.time(), outcome_metadata=outcome)
    assert capture.keep_trace(odd, team=team, key=key, is_trainable=True) == "kept"
    await until(lambda: not capture._of_team["demo"]._num_characters)
    sound = make_trace(1, started_at=time.time())
    assert capture.keep_trace(sound, team=team, key=key, is_trainable=True) == "kept"
    await capture.close()
    assert sound.episode_id in {trace.episode_id for trace in kept(store)}


async def test_feedback_on_an_answer_of_a_team_that_goes_meanwhile_is_stored_and_an_unknown_answer_is_told_at_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    scene, store = scene_of(tiny_model, tmp_path, flush_s=0.5)
    async with scene.http() as http:
        answer = await ask(http, store=True)
        capture = scene.service.capture._of_team["demo"]
        has_answer, begun, looked = capture.has_answer, time.monotonic(), list[float]()

        async def goes(*args: Any, **more: Any) -> bool:
            scene.service.capture.follow({})
            return await has_answer(*args, **more)

        async def nothing(*_: Any, **__: Any) -> bool:
            looked.append(time.monotonic() - begun)
            return False

        capture.has_answer = nothing  # type: ignore[method-assign]
        assert (await http.post("/v1/traces/x/feedback", json={"score": 1})).status_code == 404
        assert len(looked) == 2 and time.monotonic() - begun < looked[1] + 0.8, (
            "it waits before it looks again, not after"
        )
        capture.has_answer = goes  # type: ignore[method-assign]
        given = await http.post(f"/v1/traces/{answer['id']}/feedback", json={"score": 1})
    await scene.service.capture.close()
    assert given.status_code == 200 and [said.score for said in store.feedback_on()] == [1.0]


@pytest.mark.parametrize("more", [{"top_p": 0.9}, {"n": 2}, {"presence_penalty": 0.5}, {"model": "demo/group/shared"}])
async def test_answers_not_sampled_from_the_plain_policy_are_not_trainable(
    tiny_model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        await ask(http, store=True, **more)
    await scene.service.capture.close()
    (trace,) = kept(store)
    assert trace.outcome_metadata[SERVED]["is_trainable"] is False


async def test_redacted_text_is_nowhere_in_the_store_nor_in_its_tokens(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path, redact={r"[\w.]+@[\w.]+": "<email>"})
    async with scene.http() as http:
        answer = await ask(http, store=True)
        body = {"score": 0.5, "comment": "wrong: bob@example.org", "answer": "ask bob@example.org"}
        assert (await http.post(f"/v1/traces/{answer['id']}/feedback", json=body)).status_code == 200
    await scene.service.capture.close()
    (stored,) = store.feedback_on()
    assert (stored.score, stored.comment, stored.answer) == (0.5, "wrong: <email>", "ask <email>")
    (trace,) = kept(store)
    assert trace.episode_id == answer["id"]
    assert trace.task.prompt == "Write to <email>"
    assert "ann@" not in str(trace)
    assert "Write to <email>" in trace.turns[0].prompt_text
    assert not trace.turns[0].prompt_token_ids and not trace.turns[0].completion_token_ids
    assert trace.outcome_metadata[SERVED]["is_trainable"] is False
    assert Redaction({"nowhere": "x"}).redact(trace) is None


class Person:
    """An object of a workflow's own."""

    def __init__(self, mail: str) -> None:
        self.mail = mail

    def __repr__(self) -> str:
        return f"Person({self.mail})"


@dataclass
class Page:
    """A record with a field that its constructor does not take."""

    source: str
    num_words: int = field(init=False, default=1)


MAIL = "ann@example.org"


@pytest.mark.parametrize(
    "value", [{MAIL}, Person(MAIL), Page(MAIL), MAIL.encode(), {(MAIL, 1): 2}, SimpleNamespace(mail=[MAIL])]
)
def test_redaction_reads_an_object_as_the_store_writes_it(make_trace: MakeTrace, value: Any) -> None:
    trace = make_trace(outcome_metadata={"found": value})
    redacted = Redaction({r"[\w.]+@[\w.]+": "<email>"}).redact(trace)
    assert redacted is not None and not redacted.turns[0].prompt_token_ids
    assert "<email>" in str(redacted.outcome_metadata) and "ann@" not in str(redacted.outcome_metadata)
    assert Redaction({"nowhere": "x"}).redact(trace) is None


@pytest.mark.parametrize("redact", [{}, {r"[\w.]+@[\w.]+": "<email>"}])
async def test_an_outcome_that_nests_deep_does_not_lose_the_episodes_that_are_written_with_it(
    tmp_path: Path, make_trace: MakeTrace, redact: dict[str, str], tiny_model: Path
) -> None:
    scene, store = scene_of(tiny_model, tmp_path, flush_s=60, redact=redact)
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    key = ApiKey(name="web", sha256="0" * 64)
    for number, found in enumerate(("it", deep, Page("it"))):
        trace = replace(make_trace(number), started_at=time.time(), outcome_metadata={"found": found})
        scene.service.capture.keep_trace(trace, team=scene.service.teams["demo"].champion, key=key, is_trainable=True)
    await scene.service.capture.close()
    assert len(kept(store)) == 3


async def test_an_outcome_with_keys_that_are_no_texts_can_be_rated_and_counted(
    tiny_model: Path, tmp_path: Path, make_trace: MakeTrace
) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    key = ApiKey(name="anyone", sha256="0" * 64)
    trace = replace(make_trace(), started_at=time.time(), outcome_metadata={(1, 2): "moved"})
    team = scene.service.teams["demo"].champion
    scene.service.capture.keep_trace(trace, team=team, key=key, is_trainable=True)
    await scene.service.capture.close()
    async with scene.http() as http:
        rated = await http.post(f"/v1/traces/{trace.episode_id}/feedback", json={"score": 1})
    assert rated.status_code == 200, rated.text
    assert store.kept_of("demo", 3) == 1
    (stored,) = kept(store)
    assert stored.outcome_metadata.keys() == {"(1, 2)", SERVED}


async def test_the_loop_goes_on_while_a_pattern_takes_its_time(
    tiny_model: Path, tmp_path: Path, make_trace: MakeTrace
) -> None:
    scene, store = scene_of(tiny_model, tmp_path, redact={r"[\w.]+@[\w.]+": "<email>"})
    team, capture = scene.service.teams["demo"].champion, scene.service.capture
    slow = replace(make_trace(), started_at=time.time(), outcome_metadata={"note": "a." * 300_000 + " @"})
    key = ApiKey(name="web", sha256="0" * 64)
    assert scene.service.capture.keep_trace(slow, team=team, key=key, is_trainable=True) == "kept"
    closing, num_turns = asyncio.ensure_future(capture.close()), 0
    while not closing.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 10, "nothing else ran meanwhile"
    (trace,) = kept(store)
    assert trace.outcome_metadata["note"] == NOT_READ
    metrics = scene.service.metrics.text({"demo"})
    assert 'troupe_gateway_captured_total{outcome="redacted"} 1.0' in metrics


async def test_the_shadow_of_a_stored_answer_is_stored_under_the_same_task(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path, shadow=1.0)

    def is_there() -> bool:
        return (tmp_path / "served").exists() and store.is_there()

    async with scene.http() as http:
        answer = await ask(http, store=True)
        deadline = time.monotonic() + 10
        while len(traces := kept(store) if is_there() else []) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    await scene.service.capture.close()
    assert {trace.task.task_id for trace in traces} == {f"request-{answer['id']}"}
    assert {trace.outcome_metadata[SERVED]["alias"] for trace in traces} == {"champion", "candidate"}


async def test_feedback_is_stored_with_its_trace_and_the_newest_counts(tiny_model: Path, tmp_path: Path) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        answer = await ask(http, store=True)
        feedback_url = f"/v1/traces/{answer['id']}/feedback"
        first = await http.post(feedback_url, json={"score": -1})  # at once, before the episode is written
        second = await http.post(feedback_url, json={"score": 1, "comment": "right after all"})
    await scene.service.capture.close()
    assert (first.status_code, second.status_code) == (200, 200)
    (said,) = store.feedback_on([answer["id"]])
    assert (said.score, said.comment, said.key) == (1.0, "right after all", "anyone")
    ((trace, newest),) = store.judged(since=0)
    assert (trace.episode_id, newest) == (answer["id"], said)


async def test_feedback_on_an_unknown_answer_and_on_anothers_is_refused_alike(tiny_model: Path, tmp_path: Path) -> None:
    keys = {name: make_key(name, scopes=("call", "feedback")) for name in ("web", "app")}
    scene = Scene(
        tiny_model,
        capture={"share": 1.0, "flush_s": 0.02},
        keys_file=keys_file(tmp_path, *(key for _, key in keys.values())),
    )
    stores = TeamStores(run_id="demo", traces=str(tmp_path / "traces"), served=str(tmp_path / "served"))
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue"), stores=stores))
    async with scene.http(keys["web"][0]) as http:
        answer = await ask(http, store=True)
        own = await http.post(f"/v1/traces/{answer['id']}/feedback", json={"label": "good"})
    async with scene.http(keys["app"][0]) as http:
        foreign = await http.post(f"/v1/traces/{answer['id']}/feedback", json={"score": 1})
        unknown = await http.post("/v1/traces/chatcmpl-none/feedback", json={"score": 1})
        empty = await http.post(f"/v1/traces/{answer['id']}/feedback", json={})
    await scene.service.capture.close()
    assert [r.status_code for r in (own, foreign, unknown, empty)] == [200, 404, 404, 400]
    assert foreign.json()["error"]["message"].replace(answer["id"], "ID") == unknown.json()["error"]["message"].replace(
        "chatcmpl-none", "ID"
    )


async def test_no_request_fails_if_the_store_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "served").write_text("a file where a folder should be")
    scene, _ = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        await ask(http, store=True)
        await scene.service.capture.close()
        await ask(http)
        metrics = (await http.get("/metrics")).text
    assert 'troupe_gateway_captured_total{outcome="failed"} 1.0' in metrics


async def test_feedback_that_cannot_be_stored_is_refused_without_the_stores_place(
    tiny_model: Path, tmp_path: Path
) -> None:
    scene, _ = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        answer = await ask(http, store=True)
        await scene.service.capture.close()
        for file in (tmp_path / "served" / "episodes.lance" / "data").iterdir():
            file.write_bytes(file.read_bytes()[:100])
        refused = await http.post(f"/v1/traces/{answer['id']}/feedback", json={"score": 1})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "store_unreadable"
    assert str(tmp_path) not in refused.text


async def test_old_answers_are_removed_together_with_their_feedback(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "READER_GRACE", timedelta(0))
    scene, store = scene_of(tiny_model, tmp_path)
    async with scene.http() as http:
        answer = await ask(http, store=True)
        await http.post(f"/v1/traces/{answer['id']}/feedback", json={"comment": "a word that must go"})
    await scene.service.capture.close()
    assert store.drop_before(time.time() - 60) == 0
    assert store.drop_before(time.time() + 60) == 1
    assert not kept(store) and not store.feedback_on()
    files = [f for f in (tmp_path / "served").rglob("*") if f.is_file() and f.suffix == ".lance"]
    assert not any(b"a word that must go" in f.read_bytes() for f in files)


@pytest.mark.parametrize("table", ["episodes", "feedback"])
def test_what_is_written_while_old_answers_are_removed_is_kept(
    table: str, tmp_path: Path, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = ServedStore(str(tmp_path)), ServedStore(str(tmp_path))
    store.create()
    old, kept, new = (replace(make_trace(k), started_at=at) for k, at in ((0, 5.0), (1, 1e9), (2, 1e9)))
    store.write_judged([old, kept], [Feedback(trace_id=t.episode_id, key="key", at=t.started_at) for t in (old, kept)])
    open_table, dropped = store._tables.open, []

    def opened(name: str) -> object:
        found = open_table(name)
        if name == table and not dropped:
            dropped.append(other.drop_before(1e6))
        return found

    monkeypatch.setattr(store._tables, "open", opened)
    store.write_judged([new], [Feedback(trace_id=new.episode_id, key="key", at=2e9)])
    assert dropped == [1] and other.count_episodes() == 2
    assert [f.trace_id for f in other.feedback_on()] == [kept.episode_id, new.episode_id]


def test_answers_that_a_killed_removal_left_on_the_disk_go_with_a_later_one(
    tmp_path: Path, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ServedStore(str(tmp_path))
    store.create()
    store.write_judged(
        [make_trace(0, answer="a word that must go")],
        [Feedback(trace_id=make_trace(0).episode_id, key="key", at=1.0, comment="a word that must go")],
    )
    store._tables.open("feedback").delete("true")
    store._tables.open("episodes").delete("true")  # and here it was killed

    def holders() -> list[Path]:
        return [f for f in tmp_path.rglob("*.lance") if f.is_file() and b"a word that must go" in f.read_bytes()]

    assert len(holders()) == 2
    assert store.drop_before(time.time()) == 0 and len(holders()) == 2, "somebody may be reading the version before"
    monkeypatch.setattr(served, "READER_GRACE", timedelta(0))
    assert store.drop_before(time.time()) == 0
    assert holders() == []
    left = store.newest_versions()
    assert store.drop_before(time.time()) == 0 and store.newest_versions() == left, "nothing is done twice"


def test_an_old_answer_that_is_one_of_many_leaves_the_disk_with_its_feedback(
    tmp_path: Path, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "READER_GRACE", timedelta(0))
    store = ServedStore(str(tmp_path))
    store.create()
    traces = [make_trace(k, answer=f"the word {k:02}", started_at=5.0 if k == 0 else 1e9) for k in range(30)]
    feedback = [Feedback(trace_id=t.episode_id, key="key", at=1e9, comment=t.answer) for t in traces]
    store.write_judged(traces, feedback)
    assert store.drop_before(1e6) == 1
    files = [f.read_bytes() for f in tmp_path.rglob("*.lance") if f.is_file()]
    assert not any(b"the word 00" in file for file in files)
    assert sorted(kept(store), key=lambda t: t.answer) == traces[1:]
    assert sorted(store.feedback_on(), key=lambda f: f.comment) == feedback[1:]


def test_feedback_that_came_while_its_answer_was_removed_goes_when_it_is_old(tmp_path: Path) -> None:
    store = ServedStore(str(tmp_path))
    store.create()
    store.write_feedback(*(Feedback(trace_id="gone", key=f"key {at}", at=at) for at in (5.0, 15.0)))
    assert store.drop_before(10.0) == 0
    assert [f.at for f in store.feedback_on()] == [15.0]


def test_a_version_stays_for_its_readers_while_it_was_replaced_a_short_time_ago(
    tmp_path: Path, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "READER_GRACE", timedelta(seconds=1))
    store = ServedStore(str(tmp_path))
    store.create()
    store.write_episodes([make_trace(k, started_at=5.0) for k in range(4)])

    def ages() -> dict[int, timedelta]:
        return {
            v["version"]: age(v["timestamp"]) for v in ServedStore(store.uri)._tables.open("episodes").list_versions()
        }

    wait_until(lambda: min(ages().values()) > timedelta(seconds=1.2))
    reader = ServedStore(str(tmp_path))._tables
    opened = reader.open("episodes")
    assert store.drop_before(1e6) == 4
    assert sum(batch.num_rows for batch in reader.batches(opened, "")) == 4
    wait_until(lambda: min(ages().values()) > timedelta(seconds=1.2))
    assert store.drop_before(1e6) == 0 and opened.version not in ages()


async def test_long_answers_are_written_few_at_a_time_and_none_is_lost(
    tiny_model: Path, tmp_path: Path, make_trace: MakeTrace
) -> None:
    scene, store = scene_of(tiny_model, tmp_path)
    production = scene.service.teams["demo"]
    batches: list[int] = []
    config = CaptureConfig(share=1.0, flush_s=3600.0)
    assert production.config.stores is not None
    capture = Capture(
        config, production.config.stores.served, count=lambda _, num: batches.append(num) if num else None
    )
    _, key = make_key("caller")
    sizes = [10, 10, BATCH_CHARACTERS - 5_000, 2 * BATCH_CHARACTERS, 10, 10]
    for number, size in enumerate(sizes):
        metadata = {"a": "x" * size}
        trace = make_trace(episode_id=f"chatcmpl-{number}", started_at=time.time(), outcome_metadata=metadata)
        answered = capture.keep_trace(trace, team=production.champion, key=key, is_trainable=True)
        assert answered == "kept"
    await capture.close()
    assert batches == [3, 1, 2]
    assert all(store.served(f"chatcmpl-{number}") for number in range(len(sizes)))


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        ("(", "x", "no regular expression"),
        ("a", r"\g<2>", "no regular expression"),
        ("id{d}", "x", "match approximately"),
        (r"\\{e<=1}", "x", "match approximately"),
        (r"\d{1<=e<=3}", "x", "match approximately"),
    ],
)
def test_an_invalid_redaction_pattern_is_refused(pattern: str, replacement: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CaptureConfig(redact={pattern: replacement})


def test_patterns_that_only_the_redaction_knows_and_escaped_braces_are_taken() -> None:
    patterns = {r"\p{Lu}{2,}": "<name>", r"id\{d\}": "<d>", "(?i)(card) [0-9]{16}": r"\1 <number>", r"z++": "x"}
    redaction = Redaction(CaptureConfig(redact=patterns).redact)
    assert redaction.clean(["id{d} id", "Card 4111111111111111"]) == ["<d> id", "Card <number>"]
    assert redaction.clean({"AB": 1, "CD": 2, "EF": 3}) == {"<name>": 1, "<name> 2": 2, "<name> 3": 3}


@pytest.mark.parametrize("pattern", [r"\d", "[0-9a-f]{4,}", "service"])
def test_ids_are_no_text_and_cost_no_tokens(make_trace: MakeTrace, pattern: str) -> None:
    trace = make_trace(episode_id="chatcmpl-1234567", group_id="request-1234567", answer="six", outcome_metadata={})
    task = replace(trace.task, task_id="request-1234567", source="service", prompt="Six?", answers=(), metadata={})
    turn = replace(
        trace.turns[0],
        prompt_text="Six?",
        completion_text="six",
        format_fault="",
        fields={},
        sampling=Sampling(max_tokens=8),
    )
    trace = replace(trace, task=task, turns=(turn,), tool_calls=(), error="", stop_reason="")
    assert Redaction({pattern: "x"}).redact(trace) is None


def test_a_redacted_number_is_also_replaced_where_it_is_a_json_number(make_trace: MakeTrace) -> None:
    redaction = Redaction({r"\d{16}": "<card>"})
    card, other = 4111111111111111, 41
    request = {"card": card, "cards": [card, other], "at": {"n": card}}
    (call, *_) = make_trace().tool_calls
    call = replace(call, request=request, response=card)
    redacted = redaction.redact(
        replace(make_trace(), tool_calls=(call,), outcome_metadata={"card": card, "is_paid": True})
    )
    assert redacted is not None and str(card) not in str(asdict(redacted))
    assert redacted.tool_calls[0].request == {"card": "<card>", "cards": ["<card>", other], "at": {"n": "<card>"}}
    assert redacted.outcome_metadata["is_paid"] is True and not redacted.turns[0].prompt_token_ids
