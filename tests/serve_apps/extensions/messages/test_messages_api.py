"""Anthropic's Messages API with its official client: text, calls, thoughts, streams, tokens and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from gateway_scene import CHUNK, HELLO, Scene, closes_with_its_events, deployed_team, keys_file

from serve_apps.config import GatewayConfig, GatewayPortConfig, GatewayTeamConfig
from serve_apps.extensions.messages.messages import message_events
from serve_apps.gateway.routes import settled
from serve_apps.gateway.traffic.callers import Holder, make_key
from serve_apps.gateway.traffic.teams import TeamRoute

pytestmark = [pytest.mark.test, pytest.mark.anyio]

ADD: Any = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>'


@asynccontextmanager
async def client_of(scene: Scene, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(scene.api, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield anthropic.AsyncAnthropic(api_key=key, base_url="http://gateway", http_client=http, max_retries=0)


@pytest.fixture
def scene(tiny_model: Path) -> Scene:
    scene = Scene(tiny_model, extensions=("messages",))
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue", max_model_len=1024)))
    return scene


async def test_a_team_does_not_change_what_a_port_speaks_for_the_others_on_it() -> None:
    asks, others = GatewayConfig(extensions=("messages",)), {"a": GatewayTeamConfig()}
    with pytest.raises(ValueError, match=r"'b' .*'a', .*gateway\.extensions = .* there.*--replace-gateway"):
        settled(asks, "b", running=GatewayPortConfig(), teams=others, change="compatible")


async def test_a_message_has_the_text_the_usage_and_the_team(scene: Scene) -> None:
    async with client_of(scene) as client:
        message = await client.messages.create(
            model="demo/solver", messages=HELLO, system="Be short.", max_tokens=20, extra_body={"temperature": 0.5}
        )
        count = await client.messages.count_tokens(model="demo/solver", messages=HELLO, system="Be short.")
    assert [block.text for block in message.content if block.type == "text"] == ["It is 42."]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "demo/solver")
    assert message.model_extra and message.model_extra["troupe"]["team"] == "demo"
    (request,) = scene.streams.requests
    messages = [{"role": "system", "content": "Be short."}, *HELLO]
    assert list(request.prompt_token_ids) == scene.streams.tokenizer.encode_chat(messages)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (20, 0.5)
    assert message.usage.input_tokens == count.input_tokens == len(request.prompt_token_ids)
    assert scene.service.admission.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_go_out_and_their_results_come_back(scene: Scene, stream: bool) -> None:
    scene.streams.text = CALL
    ask: Any = {"model": "demo/solver", "messages": HELLO, "tools": [ADD], "max_tokens": 100}
    async with client_of(scene) as client:
        if stream:
            async with client.messages.stream(**ask) as events:
                kinds = [event.type async for event in events]
                message = await events.get_final_message()
            assert (
                (kinds[0], kinds[-1]) == ("message_start", "message_stop") and "text" in kinds and "input_json" in kinds
            )
        else:
            message = await client.messages.create(**ask)
        text, call = message.content
        assert text.type == "text" and text.text.strip() == "I add."
        assert call.type == "tool_use" and (call.name, call.input) == ("add", {"a": 6})
        assert message.stop_reason == "tool_use"
        scene.streams.text = "13"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "13"}
        back: Any = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await client.messages.create(**ask | {"messages": back})
    prompt = scene.streams.tokenizer.decode(scene.streams.requests[-1].prompt_token_ids)
    assert "I add." in prompt and '"arguments": {"a": 6}' in prompt and "tool\n13" in prompt


@pytest.mark.parametrize("text", ["word " * 14_000, r"a \u0000 b", "a \0 b"], ids=["long", "escape", "nul"])
async def test_a_block_is_read_as_a_string_is(tiny_model: Path, scene: Scene, text: str) -> None:
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue", max_model_len=400_000)))
    block = {"type": "text", "text": text}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": text}}]}

    def body(said: Any) -> dict[str, Any]:
        result = {"type": "tool_result", "tool_use_id": "c", "content": said}
        messages = [{"role": "user", "content": said}, call, {"role": "user", "content": [result]}]
        return {"model": "demo/solver", "system": said, "messages": messages, "tools": [ADD], "max_tokens": 5}

    async with scene.http() as http:
        for said in (text, [block]):
            answer = await http.post("/v1/messages", json=body(said))
            assert answer.status_code == 200, answer.text
    as_string, as_block = (list(request.prompt_token_ids) for request in scene.streams.requests)
    assert as_string == as_block
    assert scene.streams.tokenizer.decode(as_block).count(text) >= 3, "system, message and result"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_a_message_is_named(scene: Scene, stream: bool) -> None:
    ask: Any = {"model": "demo/solver", "messages": HELLO, "max_tokens": 20}
    ends = []
    async with client_of(scene) as client:
        for stops in ([" 4", "x"], ["x"]):
            if stream:
                async with client.messages.stream(**ask, stop_sequences=stops) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**ask, stop_sequences=stops)
            ends.append((message.content[0].text, message.stop_reason, message.stop_sequence))  # type: ignore[union-attr]
    assert ends == [("It is", "stop_sequence", " 4"), ("It is 42.", "end_turn", None)]


async def test_counting_tokens_takes_a_place_and_refuses_only_what_it_need_not_count(tiny_model: Path) -> None:
    scene = Scene(tiny_model, extensions=("messages",), max_in_flight=1, max_queued=0)
    context, tokenizer = 256, scene.streams.tokenizer
    most = tokenizer.most_characters(context)
    assert most is not None
    async with client_of(scene) as client:

        async def count(text: str) -> int:
            said: Any = [{"role": "user", "content": text}]
            return (await client.messages.count_tokens(model="demo/solver", messages=said)).input_tokens

        assert context < await count("1" * 300) < 400, "clients ask so that they can shorten a prompt"
        with pytest.raises(anthropic.BadRequestError, match=f"no more than {most} can fit"):
            await count("1" * most)
        assert scene.service.admission.num_in_flight == 0
        await scene.service.admission.enter(Holder("", "other"))
        with pytest.raises(anthropic.RateLimitError, match="requests are being answered"):
            await count("1")


async def test_thoughts_may_be_asked_for_and_their_budget_is_said_to_be_unread(tiny_model: Path) -> None:
    scene = Scene(tiny_model, extensions=("messages",))
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue", max_model_len=4096)))
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with client_of(scene) as client:
        raw = await client.messages.with_raw_response.create(
            model="demo/solver", messages=HELLO, max_tokens=2000, thinking=thinking
        )
    assert raw.status_code == 200 and raw.headers["x-troupe-ignored"] == "thinking.budget_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_with_the_text_that_its_caller_began(scene: Scene, stream: bool) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The product "}]}]
    ask: Any = {"model": "demo/solver", "messages": begun}
    async with client_of(scene) as client:
        if stream:
            async with client.messages.stream(**ask, max_tokens=20) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**ask, max_tokens=20)
        count = await client.messages.count_tokens(**ask)
    assert message.content[0].text == "It is 42."  # type: ignore[union-attr]
    (request,) = scene.streams.requests
    assert scene.streams.tokenizer.decode(request.prompt_token_ids).endswith("assistant\nThe product ")
    assert count.input_tokens == len(request.prompt_token_ids)


async def test_fields_that_nobody_reads_are_named(scene: Scene) -> None:
    more = {"seed": 3, "stop": ["4"], "mcp_servers": [], "metadata": {"user_id": "ada"}, "top_k": 5}
    async with client_of(scene) as client:
        raw = await client.messages.with_raw_response.create(
            model="demo/solver", messages=HELLO, max_tokens=20, extra_body=more
        )
    assert raw.headers["x-troupe-ignored"] == "mcp_servers, seed, stop"


@pytest.mark.nightly
async def test_a_call_can_be_forced(scene: Scene) -> None:
    async with client_of(scene) as client:
        await client.messages.create(
            model="demo/solver", messages=HELLO, tools=[ADD], tool_choice={"type": "any"}, max_tokens=100
        )
    assert "structural_tag" in scene.streams.requests[0].sampling.constraint


async def test_a_message_that_was_cut_says_so(scene: Scene) -> None:
    async with client_of(scene) as client:
        message = await client.messages.create(model="demo/solver", messages=HELLO, max_tokens=2)
    assert message.stop_reason == "max_tokens"


async def test_errors_have_anthropics_form(scene: Scene, tiny_model: Path, tmp_path: Path) -> None:
    async with client_of(scene) as client:
        with pytest.raises(anthropic.NotFoundError, match="there is no model 'demo/nobody'") as missing:
            await client.messages.create(model="demo/nobody", messages=HELLO, max_tokens=5)
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match="content"):
            await client.messages.create(
                model="demo/solver", messages=[{"role": "user", "content": [image]}], max_tokens=5
            )
        scene.streams.error = ConnectionError("the engine is gone")
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model="demo/solver", messages=HELLO, max_tokens=5) as events:
                await events.get_final_message()
    body = missing.value.response.json()
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"


async def test_a_key_may_come_as_anthropics_clients_send_it(tiny_model: Path, tmp_path: Path) -> None:
    secret, key = make_key("caller")
    scene = Scene(tiny_model, keys_file=keys_file(tmp_path, key), extensions=("messages",))
    async with client_of(scene, secret) as client:
        assert (await client.messages.create(model="demo/solver", messages=HELLO, max_tokens=5)).content
    async with client_of(scene, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="demo/solver", messages=HELLO, max_tokens=5)


RESULT = {"type": "tool_result", "tool_use_id": "c"}
REMOVAL = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "nobody"}}


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", RESULT | {"content": [{"type": "text", "text": 5}]}),
        ("user", RESULT | {"content": [{"type": "image", "source": "x"}]}),
        ("user", RESULT | {"content": [{"type": "document", "source": {"type": "text", "data": "The moon is far."}}]}),
        ("user", RESULT | {"content": [{"type": "search_result", "content": [{"type": "text", "text": "far"}]}]}),
        ("system", REMOVAL),
    ],
    ids=["text", "source", "document", "search result", "tool"],
)
async def test_a_block_that_vllms_converter_cannot_read_is_its_callers_fault(
    scene: Scene, role: str, block: dict[str, Any]
) -> None:
    said = [*HELLO, {"role": role, "content": [block]}]
    async with scene.http() as http:
        answer = await http.post("/v1/messages", json={"model": "demo/solver", "messages": said, "max_tokens": 5})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert not scene.service.figures(), "no failure of the team"


async def test_a_field_that_vllms_model_of_chats_refuses_is_its_callers_fault(scene: Scene) -> None:
    body = {"model": "demo/solver", "messages": HELLO, "max_tokens": 5, "cache_salt": "q7/4+a=="}
    async with scene.http() as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"], answer.text
    assert not scene.service.figures(), "no failure of the team"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": [{}] * 5000}]),
        ("messages", [{"role": "user", "content": "x"}] * 5000),
        ("tools", [ADD] * 200),
        ("max_tokens", 0),
    ],
)
async def test_a_list_without_end_is_refused(scene: Scene, field: str, value: Any) -> None:
    body = {"model": "demo/solver", "messages": HELLO, "max_tokens": 5, field: value}
    async with scene.http() as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]


async def test_it_is_off_unless_it_is_turned_on(tiny_model: Path) -> None:
    async with client_of(Scene(tiny_model)) as client:
        with pytest.raises(anthropic.NotFoundError, match=r"set gateway\.extensions: \[messages\]"):
            await client.messages.create(model="demo/solver", messages=HELLO, max_tokens=5)


async def test_closing_a_stream_ends_what_it_is_made_of_before_it_returns() -> None:
    assert await closes_with_its_events(message_events, f"data: {json.dumps(CHUNK)}\n\n")
