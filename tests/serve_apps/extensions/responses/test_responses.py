"""The Responses API with the official client: messages, calls, streams, and conversations that continue by an id."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_scene import CHUNK, Scene, closes_with_its_events
from pydantic import BaseModel

from serve_apps.extensions.responses.kept_responses import KeptResponses
from serve_apps.extensions.responses.response_events import response_events
from serve_apps.extensions.responses.responses import ResponsesRequest
from serve_apps.openai_api.protocol import ApiError
from tests.serve_apps.extensions.episodes.test_gateway_episodes import Stage, client_of

pytestmark = [pytest.mark.test, pytest.mark.anyio]

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>'


async def test_a_response_has_the_text_the_usage_and_the_team(scene: Scene) -> None:
    async with scene.openai() as client:
        response = await client.responses.create(
            model="demo/solver", input="What is 6*7?", instructions="Be short.", max_output_tokens=20, temperature=0.5
        )
    assert (response.output_text, response.status) == ("It is 42.", "completed")
    assert response.model_extra and response.model_extra["troupe"]["team"] == "demo"
    (request,) = scene.streams.requests
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 6*7?"}]
    assert list(request.prompt_token_ids) == scene.streams.tokenizer.encode_chat(messages)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (20, 0.5)
    assert response.usage and response.usage.input_tokens == len(request.prompt_token_ids)
    assert scene.service.admission.num_in_flight == 0
    (figures,) = scene.service.figures()
    assert figures["sums"]["completion_tokens"][:2] == [1, float(response.usage.output_tokens)]


async def test_a_cut_response_is_incomplete(scene: Scene) -> None:
    async with scene.openai() as client:
        response = await client.responses.create(model="demo/solver", input="x", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_go_out_and_their_results_come_back(scene: Scene, stream: bool) -> None:
    scene.streams.text = CALL
    ask: Any = {"model": "demo/solver", "input": [{"role": "user", "content": "6+?"}], "tools": [ADD], "stream": stream}
    async with scene.openai() as client:
        answer = await client.responses.create(**ask, max_output_tokens=100)
        if stream:
            events = [event async for event in answer]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta").strip() == "I add."
            (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
            assert json.loads(done.arguments) == {"a": 6} and done.output_index == 1
            answer = events[-1].response
        message, call = answer.output
        assert message.content[0].text.strip() == "I add." and (call.name, call.status) == ("add", "completed")
        scene.streams.text = "13"
        back = [*ask["input"], *(item.model_dump() for item in answer.output)]
        back.append({"type": "function_call_output", "call_id": call.call_id, "output": "13"})
        last = await client.responses.create(model="demo/solver", input=back, tools=[ADD])
    assert last.output_text == "13"
    prompt = scene.streams.tokenizer.decode(scene.streams.requests[-1].prompt_token_ids)
    assert "I add." in prompt and '"arguments": {"a": 6}' in prompt and "tool\n13" in prompt


async def test_a_stream_has_the_events_that_the_client_builds_a_response_from(scene: Scene) -> None:
    async with scene.openai() as client, client.responses.stream(model="demo/solver", input="x") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "It is 42."
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_response_continues_another_by_its_id_and_only_by_its_own_caller(scene: Scene) -> None:
    async with scene.openai() as client:
        first = await client.responses.create(model="demo/solver", input="one")
        scene.streams.text = "two"
        stream = await client.responses.create(
            model="demo/solver", input="and?", previous_response_id=first.id, stream=True
        )
        (second,) = [event.response async for event in stream if event.type == "response.completed"]
        await client.responses.create(model="demo/solver", input="three", previous_response_id=second.id)
        forgotten = await client.responses.create(model="demo/solver", input="one", store=False)
        with pytest.raises(openai.NotFoundError, match=r"is not kept here: .* send the whole conversation as input"):
            await client.responses.create(model="demo/solver", input="x", previous_response_id=forgotten.id)
    said = [("user", "one"), ("assistant", "It is 42."), ("user", "and?"), ("assistant", "two"), ("user", "three")]
    messages = [{"role": role, "content": content} for role, content in said]
    prompt = list(scene.streams.requests[2].prompt_token_ids)
    assert prompt == scene.streams.tokenizer.encode_chat(messages)
    with pytest.raises(ApiError, match="is not kept here"):
        scene.api.state.kept_responses.items(first.id, "somebody else")


def test_the_oldest_responses_make_room() -> None:
    kept = KeptResponses(max_characters=1000)
    for name in ("a", "b"):
        kept.add(name, "key", [{"type": "message", "content": "x" * 60}])
    kept.add("c", "another key", [{"type": "message", "content": "x" * 60}])
    assert kept.items("b", "key") and kept.items("c", "another key") and kept.items(None, "key") == ()
    with pytest.raises(ApiError, match="'a' is not kept"):
        kept.items("a", "key")


class Answer(BaseModel):
    """What is asked for."""

    value: int


@pytest.mark.nightly
async def test_typed_answers_and_forced_calls_constrain_the_engine(scene: Scene) -> None:
    scene.streams.text = '{"value": 42}'
    async with scene.openai() as client:
        typed = await client.responses.parse(model="demo/solver", input="x", text_format=Answer, max_output_tokens=50)
        assert typed.output_parsed == Answer(value=42)
        await client.responses.create(
            model="demo/solver", input="x", tools=[ADD], tool_choice={"type": "function", "name": "add"}
        )
    asked = [json.loads(request.sampling.constraint) for request in scene.streams.requests]
    assert asked[0]["json"]["properties"]["value"]["type"] == "integer"
    assert '"name": "add"' in json.loads(asked[1]["structural_tag"])["format"]["tags"][0]["begin"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": []}, "messages: List should have at least 1 item"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice asks for a call, but tools is empty"),
        ({"previous_response_id": "resp-0"}, "'resp-0' is not kept here"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}}, "needs `schema`"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(scene: Scene, change: Any, said: str) -> None:
    async with scene.http() as client:
        answer = await client.post("/v1/responses", json={"model": "demo/solver", "input": "x"} | change)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"], answer.text
    assert scene.service.admission.num_in_flight == 0


async def test_a_refusal_of_an_earlier_turn_is_read(scene: Scene) -> None:
    refused: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    said: Any = [{"role": "user", "content": "one"}, refused, {"role": "user", "content": "why?"}]
    async with scene.openai() as client:
        await client.responses.create(model="demo/solver", input=said)
    assert "assistant\nI will not.\n" in scene.streams.tokenizer.decode(scene.streams.requests[0].prompt_token_ids)


async def test_an_error_within_a_stream_is_raised_by_the_client(scene: Scene) -> None:
    scene.streams.error = ApiError(503, "the engine is being replaced", code="engine_unavailable")
    async with scene.openai() as client:
        stream = await client.responses.create(model="demo/solver", input="x", stream=True)
        with pytest.raises(openai.APIError, match="the engine is being replaced"):
            async for _ in stream:
                pass
    assert scene.service.admission.num_in_flight == 0


async def test_closing_a_stream_ends_what_it_is_made_of_before_it_returns() -> None:
    asked = ResponsesRequest.model_validate({"model": "m", "input": "What is 6*7?"})
    assert await closes_with_its_events(partial(response_events, asked), CHUNK)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_of_a_program_answers_and_continues_responses(
    tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    stage = Stage(tiny_model, tmp_path, "one", "two")
    async with stage.opened() as (http, episode):
        client = client_of(http, episode["base_url"])
        first = await client.responses.create(model="m", input="1?")
        second = await client.responses.create(model="m", input="2?", previous_response_id=first.id, stream=stream)
        if stream:
            *_, last = [event async for event in second]
            second = last.response
        assert (first.output_text, second.output_text, second.status) == ("one", "two", "completed")
        other = client_of(http, episode["agents"]["calculator"])
        with pytest.raises(openai.NotFoundError, match="'resp-0' is not kept here"):
            await other.responses.create(model="m", input="x", previous_response_id="resp-0")
        await http.post(f"{episode['base_url']}/outcome", json={})
    (trace,) = await stage.kept()
    prompt = list(trace.turns[1].prompt_token_ids)
    said = [*trace.turns[0].prompt_token_ids, *trace.turns[0].completion_token_ids]
    assert prompt[: len(said)] == said, "the turns continue each other"
