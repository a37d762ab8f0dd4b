"""A model that thinks, at the gateway: its thoughts stand beside its content, whole, streamed and as a response."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import HELLO, Scene, deployed_team

from serve_apps.authoring.parsers import Parsers
from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.traffic.teams import TeamRoute
from tests.small_tokenizers import NO_THOUGHT, QWEN, SWITCH, build

pytestmark = [pytest.mark.test, pytest.mark.anyio]

SAID = "<think>\n6 times 7.\n</think>\n\nIt is 42."
THOUGHTS, CONTENT = "\n6 times 7.\n", "\n\nIt is 42."
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<think>I <tool_call> it</think>\n<tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>'


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template knows thoughts, and shows those that a message brings."""
    folder = build("qwen", tmp_path_factory.mktemp("thinking") / "qwen")
    shown = "{%- for m in messages if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endfor %}"
    empty = QWEN.replace("message.content + '<|im_end|>'", "(message.content or '') + '<|im_end|>'")
    (folder / "chat_template.jinja").write_text(shown + empty + SWITCH)
    return folder


def serve(scene: Scene, *, chat_template_kwargs: dict[str, Any] | None = None, **parsers: str) -> None:
    deployed = deployed_team(scene.model, 3, "blue", max_model_len=1024)
    changes: dict[str, Any] = {
        "parsers": {"shared": Parsers(**parsers)},
        "chat_template_kwargs": chat_template_kwargs or {},
    }
    spec = replace(TeamSpec.from_dict(deployed.team_spec), **changes)
    scene.serve(TeamRoute(champion=deployed.model_copy(update={"team_spec": spec.to_dict()})))


@pytest.fixture
def scene(thinking_model: Path) -> Scene:
    scene = Scene(thinking_model)
    serve(scene)
    scene.streams.text = SAID
    return scene


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_stand_beside_the_content(scene: Scene, stream: bool) -> None:
    ask: Any = {"model": "demo/solver", "messages": HELLO, "max_tokens": 100, "stream": stream}
    async with scene.openai() as client:
        answer = await client.chat.completions.create(**ask)
        if stream:
            deltas = [chunk.choices[0].delta.model_dump() async for chunk in answer]
            message = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning", "content")}
            assert message["reasoning"] == "".join(delta.get("reasoning_content") or "" for delta in deltas)
            assert sum("reasoning" in delta for delta in deltas) > 2, "they come as they are sampled"
        else:
            message = answer.choices[0].message.model_dump()
            assert message["reasoning_content"] == message["reasoning"]
    assert (message["reasoning"], message["content"]) == (THOUGHTS, CONTENT)


async def test_thoughts_that_were_cut_leave_an_empty_content_and_can_be_left_out(scene: Scene) -> None:
    async with scene.openai() as client:
        cut = await client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=6)
        hidden = await client.chat.completions.create(
            model="demo/solver", messages=HELLO, max_tokens=100, extra_body={"include_reasoning": False}
        )
    (choice,) = cut.choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert THOUGHTS.startswith(choice.message.model_extra["reasoning"])  # type: ignore[index]
    assert hidden.choices[0].message.content == CONTENT and "reasoning" not in (
        hidden.choices[0].message.model_extra or {}
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_read_after_the_thoughts_only(scene: Scene, stream: bool) -> None:
    scene.streams.text = CALL
    ask: Any = {"model": "demo/solver", "messages": HELLO, "tools": [ADD], "max_tokens": 100, "stream": stream}
    async with scene.openai() as client:
        answer = await client.chat.completions.create(**ask)
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            thoughts = "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas)
        else:
            message = answer.choices[0].message
            calls, thoughts = message.tool_calls, message.model_extra["reasoning"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 6}] and thoughts == "I <tool_call> it"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_thoughts_come_back_under_either_name(scene: Scene, key: str) -> None:
    said = [*HELLO, {"role": "assistant", "content": None, key: "6 times 7"}, {"role": "user", "content": "and?"}]
    async with scene.openai() as client:
        await client.chat.completions.create(model="demo/solver", messages=said, max_tokens=100)
    (request,) = scene.streams.requests
    assert "<think>6 times 7</think>" in scene.streams.tokenizer.text_of(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_an_item_for_thoughts(scene: Scene, stream: bool) -> None:
    async with scene.openai() as client:
        answer: Any = await client.responses.create(
            model="demo/solver", input="6*7?", stream=stream, max_output_tokens=100
        )
        if stream:
            events = [event async for event in answer]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type for event in events]
            assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
            assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHTS
            assert {e.output_index for e in events if e.type == "response.output_text.delta"} == {1}
            answer = events[-1].response
        thoughts, message = answer.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", THOUGHTS)
        assert message.content[0].text == CONTENT
        back = [{"role": "user", "content": "6*7?"}, *(item.model_dump() for item in answer.output)]
        await client.responses.create(model="demo/solver", input=[*back, {"role": "user", "content": "and?"}])
    assert f"<think>{THOUGHTS}</think>" in scene.streams.tokenizer.text_of(scene.streams.requests[-1].prompt_token_ids)


async def test_a_setting_leaves_thoughts_in_the_text(scene: Scene) -> None:
    serve(scene, reasoning="none")
    async with scene.openai() as client:
        answer = await client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=100)
    assert answer.choices[0].message.content == SAID


async def test_any_parser_of_vllm_reads_calls_and_the_answer_is_streamed_when_it_is_complete(scene: Scene) -> None:
    serve(scene, tool="pythonic")
    ask: Any = {"model": "demo/solver", "messages": HELLO, "tools": [ADD], "max_tokens": 100, "stream": True}
    async with scene.openai() as client:
        scene.streams.text = "[add(a=6)]"
        deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**ask)]
        scene.streams.text = "It is 42."
        said = [chunk.choices[0].delta.content async for chunk in await client.chat.completions.create(**ask)]
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 6})
    assert not any(delta.content for delta in deltas)
    assert [text for text in said if text] == ["It is 42."]


async def test_tokens_of_thoughts_are_counted(scene: Scene) -> None:
    async with scene.openai() as client:
        answer = await client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=100)
    details = answer.usage and answer.usage.completion_tokens_details
    thoughts = scene.streams.tokenizer.encode(SAID.partition("</think>")[0])
    assert details and details.reasoning_tokens == len(thoughts) + 1


@pytest.mark.parametrize(
    ("model", "kwargs", "thinks"),
    [
        ("demo/solver", {}, False),
        ("demo/solver", {"enable_thinking": True}, True),
        ("demo/verifier", {}, True),
        ("demo/verifier", {"enable_thinking": False}, False),
    ],
)
async def test_an_agents_own_variables_of_the_template_hold_where_a_caller_names_none(
    scene: Scene, model: str, kwargs: dict[str, Any], thinks: bool
) -> None:
    serve(scene, chat_template_kwargs={"solver": {"enable_thinking": False}})
    async with scene.openai() as client:
        body: Any = {"chat_template_kwargs": kwargs} if kwargs else {}
        await client.chat.completions.create(model=model, messages=HELLO, max_tokens=100, extra_body=body)
    prompt = scene.streams.tokenizer.decode(scene.streams.requests[-1].prompt_token_ids)
    assert prompt.endswith(NO_THOUGHT) is not thinks


async def test_a_variable_that_the_template_does_not_read_is_refused(scene: Scene) -> None:
    with pytest.raises(
        ValueError, match=r"chat_template_kwargs of agent 'solver': .* reads no variable enable_thinkin: "
    ):
        serve(scene, chat_template_kwargs={"solver": {"enable_thinkin": False}})
