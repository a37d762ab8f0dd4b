"""The gateway's HTTP API with the official client, over policy apps that return the text of a test."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_scene import HELLO, Scene, deployed_team, keys_file
from waits import until

from serve_apps.gateway.traffic.callers import CHECK_INTERVAL_S, KeyRing, make_key, write_keys
from serve_apps.gateway.traffic.teams import Production, TeamRoute, user_position
from serve_apps.openai_api.protocol import ApiError
from stores.types import Sampling

pytestmark = [pytest.mark.test, pytest.mark.anyio]

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_a_chat_with_an_agent_uses_its_sampling_and_names_the_team_that_answered(scene: Scene) -> None:
    async with scene.openai() as client:
        answer = await client.chat.completions.with_raw_response.create(model="demo/solver", messages=HELLO, seed=5)
    assert answer.headers["x-troupe-team"] == "demo@3"
    chat = answer.parse()
    (choice,) = chat.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 42.", "stop")
    assert chat.system_fingerprint == "demo@3" and chat.model == "demo/solver"
    assert chat.usage and chat.usage.completion_tokens == len(scene.streams.tokenizer.encode("It is 42.")) + 1
    assert chat.model_extra and chat.model_extra["troupe"]["policy_versions"] == {"shared": 3}
    (request,) = scene.streams.requests
    assert request.sampling == Sampling(max_tokens=32, temperature=0.7) and request.seed == 5
    expected = scene.streams.tokenizer.encode_chat(HELLO)
    assert list(request.prompt_token_ids) == expected
    assert scene.service.in_flight() == [] and scene.service.admission.num_in_flight == 0


async def test_a_stream_sends_the_same_text_in_pieces_and_counts_its_tokens(scene: Scene) -> None:
    async with scene.openai() as client:
        stream = await client.chat.completions.create(
            model="demo/solver", messages=HELLO, stream=True, stream_options={"include_usage": True}, n=2
        )
        chunks = [chunk async for chunk in stream]
    texts: dict[int, str] = {}
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {0: "It is 42.", 1: "It is 42."} and reasons == {0: "stop", 1: "stop"}
    usage = chunks[-1].usage
    assert usage and usage.completion_tokens == 2 * (len(scene.streams.tokenizer.encode("It is 42.")) + 1)
    assert len(chunks) > 8 and {chunk.system_fingerprint for chunk in chunks} == {"demo@3"}
    assert scene.service.admission.num_in_flight == 0
    seeds = [request.seed for request in scene.streams.requests]
    assert seeds[1] == (seeds[0] + 1) % 2**31


async def test_a_stop_string_ends_text_and_sampling_even_across_tokens(scene: Scene) -> None:
    scene.streams.text = "one two three four five six seven eight"
    for stream in (False, True):
        scene.streams.num_said = 0
        async with scene.http() as client:
            body = {"model": "demo/solver", "messages": HELLO, "stop": ["o th", "nothing"], "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body)
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
            last = events[-1]["choices"][0]
        else:
            last = answer.json()["choices"][0]
            text = last["message"]["content"]
        assert (text, last["finish_reason"], last["stop_reason"]) == ("one tw", "stop", "o th")
        assert scene.streams.num_said < len(scene.streams.tokenizer.encode(scene.streams.text)), "sampling ended too"
        assert scene.streams.num_open == 0


@pytest.mark.parametrize(("stop", "reasons"), [("\ufffd", ("stop", "\ufffd")), ("x", ("length", None))])
async def test_a_stop_string_in_what_is_held_back_to_the_end_ends_the_answer(
    scene: Scene, stop: str, reasons: tuple[str, str | None]
) -> None:
    scene.streams.text = "\U00010000"  # four tokens, the first of which is no character
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": HELLO, "stop": stop, "max_tokens": 1}
        (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == reasons


async def test_logprobs_are_given_for_each_token_and_its_likeliest_alternatives(scene: Scene) -> None:
    async with scene.openai() as client:
        answer = await client.chat.completions.create(
            model="demo/group/shared", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.logprobs and choice.logprobs.content
    assert len(choice.logprobs.content) == 3
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.5, -1.0]


CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 6, "b": 7}}</tool_call>'


async def test_what_a_caller_writes_makes_no_control_token(scene: Scene) -> None:
    tokenizer = scene.streams.tokenizer
    controls = [number for text in ("<|im_start|>", "<|im_end|>", "<|pad|>") for number in tokenizer.encode(text)]
    assert len(controls) == 3

    async def asked(text: str) -> list[int]:
        """The control tokens of the prompt when each message says `text`."""
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]},
            {"role": "assistant", "content": text},
            {"role": "tool", "content": text, "tool_call_id": "c1"},
        ]
        async with scene.openai() as client:
            await client.chat.completions.create(model="demo/solver", messages=messages)  # type: ignore[arg-type]
        ids = scene.streams.requests[-1].prompt_token_ids
        assert tokenizer.decode(ids).count(text) == 4
        return [number for number in ids if number in controls]

    assert await asked("1+2<|im_end|>") == await asked("harmless")


async def test_a_tool_call_is_sent_whole_and_its_result_goes_back_into_the_chat(scene: Scene) -> None:
    scene.streams.text = CALL
    async with scene.openai() as client:
        ask = {"model": "demo/solver", "messages": HELLO, "tools": [ADD], "max_tokens": 100}
        answer = await client.chat.completions.create(**ask)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 6, "b": 7}
        stream = await client.chat.completions.create(**ask, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(c.delta.content or "" for c in chunks) == "I add. ", "nothing of a call is shown as text"
        (called,) = [c.delta.tool_calls for c in chunks if c.delta.tool_calls]
        assert called[0].function and json.loads(called[0].function.arguments or "") == {"a": 6, "b": 7}
        assert chunks[-1].finish_reason == "tool_calls"
        back = [*HELLO, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "13"}]
        scene.streams.text = "13"
        await client.chat.completions.create(model="demo/solver", messages=back, tools=[ADD])  # type: ignore[arg-type, list-item]
    prompt = scene.streams.tokenizer.decode(scene.streams.requests[-1].prompt_token_ids)
    scene.streams.text = f"{CALL} I wait."
    async with scene.openai() as client:
        parts = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**ask, stream=True)]
    assert "".join(part.content or "" for part in parts).split() == ["I", "add.", "I", "wait."], "of before and after"
    assert '"arguments": {"a": 6, "b": 7}' in prompt and "tool\n13" in prompt and 'Tools:\n{"name": "add"' in prompt


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "rob", "arguments": {}}</tool_call>',
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "add", "arguments": "6"}</tool_call>',
    ],
)
async def test_text_that_is_not_a_call_of_an_offered_tool_stays_text(scene: Scene, text: str) -> None:
    scene.streams.text = text
    async with scene.openai() as client:
        for stream in (False, True):
            ask = {"model": "demo/solver", "messages": HELLO, "tools": [ADD], "max_tokens": 100, "stream": stream}
            answer = await client.chat.completions.create(**ask)
            if stream:
                chunks = [c.choices[0] async for c in answer]
                text_shown, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
            else:
                text_shown, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert (text_shown, reason) == (text, "stop")


async def test_tools_are_refused_if_the_chat_template_does_not_support_them(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "plain")
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": plain}))
    scene = Scene(folder)
    async with scene.openai() as client:
        with pytest.raises(openai.BadRequestError, match="chat template of model 'demo/solver' does not support tools"):
            await client.chat.completions.create(model="demo/solver", messages=HELLO, tools=[ADD])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "demo/nobody"}, 404, "there is no model 'demo/nobody'"),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        ({"audio": {"voice": "alloy"}}, 400, "unknown or unsupported field 'audio'"),
        ({"top_logprobs": 2}, 400, "top_logprobs needs logprobs: true"),
        ({"max_tokens": 1000}, 400, "and max_tokens is 1000: ask for at most"),
        (
            {"messages": [{"role": "user", "content": "x " * 3000}]},
            400,
            "This model's maximum context length is 256 tokens. However, the prompt has",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 413, "at most 2000000 are accepted"),
    ],
)
async def test_errors_about_a_body_name_the_field_and_the_fix(
    scene: Scene, change: Any, status: int, said: str
) -> None:
    async with scene.http() as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo/solver", "messages": HELLO} | change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"] and error["type"] and error["code"]
    assert scene.service.admission.num_in_flight == 0 and scene.service.in_flight() == []


async def test_invalid_json_and_unknown_routes_have_the_same_form_of_error(scene: Scene) -> None:
    async with scene.http() as client:
        broken = await client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]
        nowhere = await client.get("/v1/nowhere")
        assert nowhere.status_code == 404 and nowhere.json()["error"]["code"] == "not_found"
        wrong = await client.get("/v1/chat/completions")
        assert wrong.status_code == 405 and wrong.json()["error"]["message"]


async def test_keys_allow_what_their_scopes_say_until_they_expire_or_are_revoked(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    caller, of_caller = make_key("web", requests_per_minute=2)
    old, of_old = make_key("old", expires_at=1.0)
    judge, of_judge = make_key("judge", scopes=("feedback",))
    write_keys(file, [of_caller, of_old, of_judge])
    assert caller not in file.read_text() and file.stat().st_mode & 0o077 == 0
    scene = Scene(tiny_model, keys_file=str(file))
    body = {"model": "demo/solver", "messages": HELLO}

    async def ask(key: str) -> tuple[int, str]:
        async with scene.http(key) as client:
            answer = await client.post("/v1/chat/completions", json=body)
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

    assert await ask("") == (401, "missing_api_key")
    assert await ask("troupe-guess") == (401, "invalid_api_key")
    assert await ask(old) == (401, "expired_api_key")
    assert await ask(judge) == (403, "missing_scope")
    assert [await ask(caller) for _ in range(3)] == [(200, ""), (200, ""), (429, "rate_limit_exceeded")]
    write_keys(file, [of_judge])
    await asyncio.sleep(1.1)
    assert await ask(caller) == (401, "invalid_api_key")
    file.write_text("no keys")
    await asyncio.sleep(1.1)
    assert await ask(judge) == (403, "missing_scope"), "a broken file leaves the last good keys in force"
    assert "keys.json" in scene.service.status()["keys_faults"]["demo"]


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8000", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("gateway.internal", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("user@evil.example", False),
        ("[::1", False),
        ("", False),
    ],
)
async def test_a_gateway_without_keys_answers_to_its_own_names_only(
    tiny_model: Path, tmp_path: Path, host: str, is_ours: bool
) -> None:
    scene = Scene(tiny_model, allowed_hosts=("gateway.internal",))
    async with scene.http() as client:
        for path in ("/health", "/v1/models", "/v1/admin/status"):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == (200 if is_ours else 403), answer.text
            assert is_ours or answer.json()["error"]["code"] == "host_not_allowed"
    async with Scene(tiny_model, keys_file=keys_file(tmp_path)).http() as client:
        assert (await client.get("/health", headers={"Host": host})).status_code == 200, "a key is asked for instead"


async def test_nothing_of_a_body_is_read_before_its_key_is_known(tiny_model: Path, tmp_path: Path) -> None:
    secret, key = make_key("web")
    scene = Scene(tiny_model, keys_file=keys_file(tmp_path, key))
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for part in (b'{"model": ', b'"demo/solver"}'):
            num_read += 1
            yield part

    async def ask(key: str, path: str) -> int:
        async with scene.http(key) as client:
            headers = {"Content-Length": "24", "Content-Type": "application/json"}
            return (await client.post(path, content=body(), headers=headers)).status_code

    for path in (
        "/v1/chat/completions",
        "/v1/workflows/demo/runs",
        "/v1/episodes",
        "/v1/traces/x/feedback",
        "/v1/nowhere",
    ):
        assert await ask("troupe-guess", path) == 401 and num_read == 0, path
    assert await ask(secret, "/v1/chat/completions") == 400 and num_read == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (r'"\ud800"', "half of a surrogate pair"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
        ("NaN", "NaN or infinite"),
        ("-1e999", "NaN or infinite"),
    ],
)
async def test_what_could_not_be_stored_is_refused_in_every_body(scene: Scene, value: str, reason: str) -> None:
    bodies = {
        "/v1/chat/completions": '{"model": "demo/solver", "messages": [{"role": "user", "content": "a"}], "metadata": {"a": VALUE}}',
        "/v1/workflows/demo/runs": '{"prompt": "a", "metadata": {"a": VALUE}}',
        "/v1/episodes": '{"team": "demo", "metadata": {"a": VALUE}}',
        "/v1/traces/x/feedback": '{"label": VALUE}',
    }
    async with scene.http() as client:
        for path, body in bodies.items():
            headers = {"Content-Type": "application/json"}
            answer = await client.post(path, content=body.replace("VALUE", value), headers=headers)
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"], (path, answer.text)
    assert scene.service.figures() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": [{}] * 100_000}]),
        ("messages", [{}] * 100_000),
        ("tools", [{}] * 100_000),
        ("messages", [{"role": "assistant", "tool_calls": [{}] * 100_000}]),
        ("stop", ["x"] * 100_000),
    ],
)
async def test_a_list_without_end_is_refused_at_its_first_faults(scene: Scene, field: str, value: Any) -> None:
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": HELLO} | {field: value}
        answer = await client.post("/v1/chat/completions", json=body)
    (error,) = answer.json().values()
    is_counted = "more than the 20000 objects and lists" in error["message"]
    assert answer.status_code == 400 and (is_counted or error["param"].startswith(field)), error
    assert len(error["message"]) < 300, error


async def test_requests_beyond_slots_and_queue_are_refused_and_the_others_are_answered(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_in_flight=2, max_queued=3, queue_timeout_s=30)
    scene.streams.pause_s = 0.05
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": HELLO}
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(12)))
        assert sorted(a.status_code for a in answers) == [200] * 5 + [429] * 7
        shed = next(a for a in answers if a.status_code == 429)
        assert shed.headers["Retry-After"] == "1" and shed.json()["error"]["code"] == "overloaded"
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200, "it recovers by itself"
    assert scene.service.admission.num_in_flight == scene.service.admission.num_waiting == 0


async def test_waiting_too_long_for_a_slot_or_an_answer_is_an_error(tiny_model: Path) -> None:
    scene = Scene(tiny_model, max_in_flight=1, queue_timeout_s=0.1, request_timeout_s=0.4)
    scene.streams.pause_s = 5.0
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": HELLO}
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(2)))
        assert sorted((a.status_code, a.json()["error"]["code"]) for a in answers) == [
            (503, "overloaded"),
            (504, "timeout"),
        ]
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
        assert '"code": "timeout"' in stream.text and "[DONE]" not in stream.text
    assert scene.streams.num_open == 0 and scene.service.in_flight() == []


async def test_a_request_stays_on_its_team_through_a_switch_and_the_next_gets_the_new_team(scene: Scene) -> None:
    scene.streams.pause_s = 0.05
    async with scene.http() as client:
        body = {"model": "demo/solver", "messages": HELLO, "stream": True}
        asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await until(scene.service.in_flight)
        assert scene.service.in_flight() == [{"team": "demo", "set_name": "blue", "team_version": 3, "num": 1}]
        scene.serve(TeamRoute(champion=deployed_team(scene.model, 4, "green")))
        old = await asked
        new = await client.post("/v1/chat/completions", json=body)
    fingerprints = [
        {json.loads(line[6:])["system_fingerprint"] for line in a.text.splitlines() if line.startswith("data: {")}
        for a in (old, new)
    ]
    assert fingerprints == [{"demo@3"}, {"demo@4"}]


def test_users_keep_their_team_and_a_growing_share_moves_users_only_to_the_candidate(tiny_model: Path) -> None:
    both = {"champion": deployed_team(tiny_model, 3, "blue"), "candidate": deployed_team(tiny_model, 4, "green")}
    shares = (0.0, 0.1, 0.5, 1.0)
    split = {share: Production.build("demo", TeamRoute(**both, share=share)) for share in shares}
    users = [f"user-{i}" for i in range(2000)]
    moved = {share: {u for u in users if of.choose_contender(u).version == 4} for share, of in split.items()}
    assert not moved[0.0] and moved[0.0] <= moved[0.1] <= moved[0.5] <= moved[1.0] == set(users)
    assert 150 < len(moved[0.1]) < 250 and 920 < len(moved[0.5]) < 1080
    assert user_position("user-1", "a") != user_position("user-1", "b"), "another salt assigns anew"


def test_callers_without_a_user_who_ask_in_turn_give_each_team_requests_of_both_kinds(tiny_model: Path) -> None:
    both = {"champion": deployed_team(tiny_model, 3, "blue"), "candidate": deployed_team(tiny_model, 4, "green")}
    production = Production.build("demo", TeamRoute(**both, share=0.5, shadow=0.5))
    versions = [production.choose_contender(None).version for _ in range(400)]  # of a solver and a verifier in turn
    assert 60 < versions[::2].count(4) < 140 and 60 < versions[1::2].count(4) < 140
    copied = [production.choose_shadow_team(production.champion) is not None for _ in range(400)]
    assert 60 < sum(copied[::2]) < 140 and 60 < sum(copied[1::2]) < 140


async def test_who_has_no_key_learns_no_more_than_that_the_gateway_runs(tiny_model: Path, tmp_path: Path) -> None:
    caller, of_caller = make_key("web")
    scraper, of_scraper = make_key("prometheus", scopes=("metrics",))
    scene = Scene(tiny_model, keys_file=keys_file(tmp_path, of_caller, of_scraper))

    async def ask(key: str, path: str) -> tuple[int, str]:
        async with scene.http(key) as client:
            answer = await client.get(path)
        return answer.status_code, answer.text

    assert await ask("", "/ready") == (200, '{"status":"ready"}')
    assert (await ask(scraper, "/ready"))[1] == '{"status":"ready","teams":{"demo":3}}'
    assert (await ask("", "/health"))[0] == 200
    assert [(await ask(key, "/metrics"))[0] for key in ("", caller, scraper)] == [401, 403, 200]
    assert [(await ask(key, "/openapi.json"))[0] for key in ("", caller, scraper)] == [401, 200, 200]
    assert (await ask("", "/docs"))[0] == 404
    async with scene.http() as client:
        assert [(await client.head(path)).status_code for path in ("/health", "/ready", "/v1/models")] == [
            200,
            200,
            401,
        ]


async def test_metrics_contain_no_text_of_requests_and_readiness_depends_on_a_team(scene: Scene) -> None:
    async with scene.http() as client:
        await client.post("/v1/chat/completions", json={"model": "demo/solver", "messages": HELLO})
        text = (await client.get("/metrics")).text
        assert 'troupe_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'troupe_gateway_answers_total{key="anyone",team="demo",version="3"} 1.0' in text
        assert "6*7" not in text
        assert (await client.get("/ready")).json() == {"status": "ready", "teams": {"demo": 3}}
        scene.service.deploy({})
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        nobody = await client.post("/v1/chat/completions", json={"model": "demo/solver", "messages": HELLO})
        assert nobody.status_code == 503 and "no team is deployed" in nobody.json()["error"]["message"]


async def test_a_revoked_key_is_refused_even_if_the_file_keeps_its_modification_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret, key = make_key("web")
    _, other = make_key("owl")
    write_keys(path, [key])
    ring, time_ns = KeyRing(path), path.stat().st_mtime_ns
    assert ring.find(f"Bearer {secret}").name == key.name
    write_keys(path, [other])
    os.utime(path, ns=(time_ns, time_ns))
    await asyncio.sleep(CHECK_INTERVAL_S + 0.05)
    with pytest.raises(ApiError, match="not known"):
        ring.find(f"Bearer {secret}")


async def test_a_stream_of_a_key_that_is_revoked_goes_on_to_its_end_and_is_the_last(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What the guide says of it (guides/gateway.md)."""
    file = tmp_path / "keys.json"
    secret, key = make_key("web")
    _, other = make_key("owl")
    write_keys(file, [key])
    scene = Scene(tiny_model, keys_file=str(file))
    scene.streams.pause_s = 0.5
    body = {"model": "demo/solver", "messages": HELLO, "stream": True}
    async with scene.http(secret) as client:
        asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await until(scene.service.in_flight)
        write_keys(file, [other])
        await asyncio.sleep(CHECK_INTERVAL_S + 0.05)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 401
        assert scene.service.in_flight(), "it has not ended before"
        assert (await asked).text.endswith("data: [DONE]\n\n")


async def test_metadata_that_is_nested_too_deep_to_be_stored_is_refused(scene: Scene) -> None:
    fits: dict[str, Any] = {"a": 1}
    for _ in range(18):
        fits = {"a": [fits["a"]]}
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": [deep]}
    async with scene.http() as client:
        refused = await client.post("/v1/episodes", json={"team": "demo", "metadata": deep})
        assert refused.status_code == 400 and "nested more than 20 deep" in refused.json()["error"]["message"]
        assert (await client.post("/v1/episodes", json={"team": "demo", "metadata": fits})).status_code == 200
