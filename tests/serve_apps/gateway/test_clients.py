"""What clients of OpenAI's API and of vLLM's server rely on: headers, names of models, forced calls, bare completions."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_scene import HELLO, Scene, keys_file

from serve_apps.gateway.traffic.callers import make_key

pytestmark = [pytest.mark.test, pytest.mark.anyio]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>'
CHAT = {"model": "demo/solver", "messages": HELLO}


@pytest.mark.nightly
async def test_a_forced_call_constrains_the_engine_in_the_models_own_format(scene: Scene) -> None:
    scene.streams.text = CALL + CALL
    async with scene.openai() as client:
        answer = await client.chat.completions.create(
            **CHAT, tools=[ADD], tool_choice="required", max_tokens=110, parallel_tool_calls=False
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments) == {"a": 6}
    (request,) = scene.streams.requests
    tag = json.loads(json.loads(request.sampling.constraint)["structural_tag"])
    assert tag["format"]["tags"][0]["begin"].startswith("<tool_call>") and tag["format"]["stop_after_first"]
    (figures,) = scene.service.figures()
    assert figures["sums"]["completion_tokens"][0] == 1, "it is counted as any answer"


@pytest.mark.nightly
async def test_what_is_asked_of_the_engine_reaches_it(scene: Scene) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    async with scene.openai() as client:
        await client.chat.completions.create(**CHAT, response_format=form)  # type: ignore[call-overload]
        await client.chat.completions.create(
            **CHAT,
            logit_bias={"7": -3},
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 2, "ignore_eos": True},
        )
    typed, chosen = scene.streams.requests
    tokenizer = scene.streams.tokenizer
    tokens = {"end_ids": sorted(tokenizer.end_ids), "never": sorted(tokenizer.turn_ids)}
    assert json.loads(typed.sampling.constraint) == {"json": SCHEMA} | tokens and not typed.settings
    tag = json.loads(json.loads(chosen.sampling.constraint)["structural_tag"])
    assert [choice["value"] for choice in tag["format"]["elements"]] == ["yes", "no"]
    assert chosen.settings == {"logit_bias": {7: -3.0}, "min_tokens": 2, "ignore_eos": True}


async def test_what_nobody_reads_is_named_and_cannot_break_the_headers(scene: Scene) -> None:
    message = HELLO[0] | {"cache_breakpoint": True, "évil\r\nx-injected: 1": 2}
    async with scene.http() as client:
        body = CHAT | {"messages": [message], "chat_template_kwargs": {"enable_thinking": False}, "verbosity": "low"}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and "x-injected" not in answer.headers
    assert answer.headers["x-troupe-ignored"] == (
        "messages.cache_breakpoint, messages.?vil??x-injected??1, enable_thinking, verbosity"
    )


async def test_token_ids_are_returned_on_request_at_once_and_in_pieces(scene: Scene) -> None:
    async with scene.http() as client:
        whole = (await client.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True})).json()
        stream = await client.post("/v1/chat/completions", json=CHAT | {"return_token_ids": True, "stream": True})
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    ids = whole["choices"][0]["token_ids"]
    assert ids == [*scene.streams.tokenizer.encode("It is 42."), scene.streams.tokenizer.eos_id]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    assert (
        chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == list(scene.streams.requests[0].prompt_token_ids)
    )


async def test_models_have_names_without_a_slash_and_say_their_context(scene: Scene) -> None:
    async with scene.openai() as client:
        models = {model.id: model async for model in client.models.list()}
        assert {"demo/solver", "demo/group/shared"} <= models.keys() and len(models) == 10
        assert models["demo--solver"].model_extra == models["demo/solver"].model_extra == {"max_model_len": 256}
        assert (await client.models.retrieve("demo--group--shared")).id == "demo--group--shared"
        answer = await client.chat.completions.create(model="demo--solver", messages=HELLO)
        assert answer.model == "demo--solver"
        with pytest.raises(openai.NotFoundError, match="models are demo/finalizer, demo/group/shared, demo/refiner"):
            await client.models.retrieve("demo--nobody")


async def test_every_answer_has_a_request_id_and_a_callers_own_comes_back(scene: Scene) -> None:
    async with scene.http() as client:
        for own in ("my-id-1", ""):
            headers = {"x-request-id": own} if own else {}
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/chat/completions", {}), ("/v1/nowhere", {})):
                answer = await client.post(path, json=body, headers=headers)
                assert answer.headers["x-request-id"] == (own or answer.headers["x-request-id"]) != ""
        forged = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a b"})
        assert forged.headers["x-request-id"] == forged.json()["id"]
        scene.streams.error = RuntimeError("unforeseen")
        broken = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "my-id-2"})
        assert (broken.status_code, broken.headers["x-request-id"]) == (500, "my-id-2")


async def test_the_rate_of_a_key_is_told_in_openais_headers(tiny_model: Path, tmp_path: Path) -> None:
    secret, key = make_key("app", requests_per_minute=2)
    scene = Scene(tiny_model, keys_file=keys_file(tmp_path, key))
    async with scene.http(secret) as client:
        answers = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    told = [[answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")] for answer in answers]
    assert told == [["2", "1"], ["2", "0"], ["2", "0"]]
    assert 25 < float(answers[0].headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30


async def test_pages_of_allowed_origins_may_call_and_others_not(tiny_model: Path) -> None:
    scene = Scene(tiny_model, allowed_origins=("https://chat.example.com",))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with scene.http() as client:
        for origin, allowed in (("https://chat.example.com", True), ("https://evil.example.com", False)):
            asked = await client.options("/v1/chat/completions", headers={"Origin": origin, **ask})
            assert (asked.status_code == 200) is allowed
            answer = await client.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


async def test_bodies_may_come_in_pieces_and_without_a_type_but_neither_packed_nor_slow(
    tiny_model: Path, tmp_path: Path
) -> None:
    secret, key = make_key("app")
    scene = Scene(tiny_model, receive_timeout_s=0.3, max_body_bytes=2000, keys_file=keys_file(tmp_path, key))
    whole = json.dumps(CHAT).encode()

    async def pieces(*, pause_s: float = 0.0, more: bytes = b"") -> AsyncIterator[bytes]:
        yield whole[:10]
        await asyncio.sleep(pause_s)
        yield whole[10:] + more

    async with scene.http(secret) as client:
        url = "/v1/chat/completions"
        assert (await client.post(url, content=pieces())).status_code == 200
        assert (await client.post(url, content=whole)).status_code == 200
        large = await client.post(url, content=pieces(more=b" " * 2000))
        assert large.status_code == 413 and "more than the 2000 bytes" in large.json()["error"]["message"]
        slow = await client.post(url, content=pieces(pause_s=1.0))
        assert slow.status_code == 408 and "within 0.3 s" in slow.json()["error"]["message"]
        packed = await client.post(url, content=gzip.compress(whole), headers={"Content-Encoding": "gzip"})
        assert packed.status_code == 415 and "'gzip' are not accepted" in packed.json()["error"]["message"]
        nowhere = await client.post("/v1/nowhere", json={})
        assert "no route POST /v1/nowhere; GET /openapi.json lists them" in nowhere.json()["error"]["message"]
        assert (await client.get("/version")).json()["version"]
    assert scene.service.admission.num_in_flight == 0
    async with Scene(tiny_model).http() as client:
        typeless = await client.post(url, content=whole)
        assert typeless.status_code == 400, "without keys any page could make a browser send it"
        typed = await client.post(url, content=whole, headers={"Content-Type": "application/json"})
        assert typed.status_code == 200


async def test_one_key_never_has_all_places(tiny_model: Path, tmp_path: Path) -> None:
    """Streams that nobody reads hold their places; those of other keys stay free, and a waiting request gets the next."""
    made = [make_key(name) for name in ("greedy", "modest")]
    scene = Scene(
        tiny_model,
        keys_file=keys_file(tmp_path, *(key for _, key in made)),
        max_in_flight=4,
        max_queued=4,
        queue_timeout_s=5,
    )
    scene.streams.pause_s = 0.05
    (greedy, _), (modest, _) = made
    body = CHAT | {"stream": True}
    async with scene.http(greedy) as many, scene.http(modest) as one:
        asked = [asyncio.ensure_future(many.post("/v1/chat/completions", json=body)) for _ in range(12)]
        await asyncio.sleep(0.2)
        assert scene.service.admission.num_in_flight == 3, "of four places three"
        assert (await one.post("/v1/chat/completions", json=CHAT)).status_code == 200
        answers = await asyncio.gather(*asked)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 6 and statuses.count(429) == 6, "three at once and three that waited"
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "of API key 'greedy' 3 and 3" in refused.json()["error"]["message"]
    assert scene.service.admission.num_in_flight == scene.service.admission.num_waiting == 0
