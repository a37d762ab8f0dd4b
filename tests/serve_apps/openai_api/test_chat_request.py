"""Bodies of chat completions as the clients of OpenAI's API and of vLLM's server send them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import invalid_body_error
from serve_apps.openai_api.sampling_fields import MAX_GRAMMAR

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "What is 6*7?"}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def body(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "demo/solver", "messages": [USER]} | more)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [ADD], "tool_choice": "required"},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": [ADD], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tools": [{"type": "function", "function": {"name": "now", "parameters": None, "strict": None}}]},
        {"tools": [ADD | {"cache_control": {"type": "ephemeral"}}]},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": '{"type": "object"}', "json_object": False}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"grammar": 'root ::= "a"', "regex": None}},
        {"structured_outputs": {"json_object": True}},
        {"max_tokens": 5.0, "n": 1.0, "seed": 7.0},
        {"top_k": -1},
        {"repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [2]},
        {"logit_bias": {"50256": -100, "7": 1.5}},
        {"allowed_token_ids": [1, 2, 3]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "verbosity": "low"},
        {"return_token_ids": True, "priority": 0},
        {"service_tier": "auto", "safety_identifier": "u", "prompt_cache_key": "k", "modalities": ["text"]},
        {"prompt_cache_retention": "24h", "store": False, "metadata": {"a": "b"}, "user": "u"},
        {
            key: None
            for key in (
                *("logit_bias", "reasoning_effort", "service_tier", "audio", "functions", "n", "stream", "logprobs"),
                *("temperature", "top_p", "presence_penalty", "stop", "seed", "response_format", "stream_options"),
            )
        },
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        {
            "messages": [USER, {"role": "assistant", "content": "4"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": [USER, {"role": "assistant", "content": "42", "reasoning_content": "6 times 7", "refusal": "no"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
    ],
    ids=lambda more: ",".join(more)[:60],
)
def test_what_clients_send_is_taken(more: Any) -> None:
    body(**more)


def test_an_answer_goes_back_as_openais_helpers_keep_it_and_foreign_keys_are_named() -> None:
    parsed = {
        "role": "assistant",
        "content": None,
        "parsed": None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [{**CALL, "index": 0, "function": {"name": "add", "arguments": "{}", "parsed_arguments": {}}}],
    }
    request = body(
        messages=[USER | {"cache_breakpoint": True}, parsed, {"role": "tool", "tool_call_id": "c1", "content": "1"}]
    )
    assert request.dropped == ["messages.cache_breakpoint"], "the keys of OpenAI's own client are not worth a word"
    assert request.messages[1].for_template() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}],
    }
    copied = request.model_copy(update={"stream": True})
    assert copied.dropped == request.dropped


def test_the_prompt_has_all_tools_whatever_may_be_called() -> None:
    free, without = body(tools=[ADD]), body(tools=[ADD], tool_choice="none")
    assert free.shown_tools == without.shown_tools == free.callable_tools and without.callable_tools == []
    bare = body(tools=[{"type": "function", "function": {"name": "now"}}]).shown_tools
    assert bare == [{"type": "function", "function": {"name": "now", "parameters": {}}}]


def test_settings_for_the_engine_are_those_that_are_no_default() -> None:
    assert body(repetition_penalty=1.0, min_tokens=0, presence_penalty=0).engine_settings == {}
    settings = body(logit_bias={"7": 1.5}, ignore_eos=True, stop_token_ids=[3], frequency_penalty=1).engine_settings
    assert settings == {"logit_bias": {7: 1.5}, "ignore_eos": True, "stop_token_ids": [3], "frequency_penalty": 1.0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice asks for a call, but tools is empty"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "names 'sub', which is not among tools",
        ),
        ({"tools": [ADD], "tool_choice": "maybe"}, "'auto', 'none' or 'required'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema belongs to type 'json_schema'"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "json_schema belongs to type",
        ),
        ({"response_format": {"type": "xml"}}, "'text', 'json_object' or 'json_schema'"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "at least 1 item"),
        ({"structured_outputs": {"choice": ["x" * 1000] * 100}}, f"more than {MAX_GRAMMAR} characters"),
        ({"structured_outputs": {"regex": "a\0"}}, "the character NUL"),
        ({"structured_outputs": {"json": {"pattern": "a\0"}}}, "the character NUL"),
        ({"structured_outputs": {"json_object": False}}, "exactly one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "Extra inputs are not permitted"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR + 1)}}, f"more than {MAX_GRAMMAR} characters"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"messages": []}, "List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "has neither content nor tool calls"),
        ({"n": 99}, "less than or equal to 16"),
        ({"stop": [""]}, "stop has an empty string"),
        ({"max_tokens": 5.5}, "valid integer"),
        ({"max_tokens": True}, "valid integer"),
        ({"top_k": -2}, "greater than or equal to -1"),
        ({"logit_bias": {"x": 1}}, "should match pattern"),
        ({"logit_bias": {"1": 101}}, "less than or equal to 100"),
        ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
        ({"stop_token_ids": [*range(65)]}, "at most 64 items"),
        ({"allowed_token_ids": [*range(1025)]}, "at most 1024 items"),
        ({"continue_final_message": True}, "needs add_generation_prompt: false"),
        ({"modalities": ["audio"]}, "Input should be 'text'"),
        ({"audio": {"voice": "alloy"}}, "Extra inputs are not permitted"),
        ({"functions": []}, "Extra inputs are not permitted"),
        ({"priority": 5}, "Input should be 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, "Input should be 'text'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(more: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        body(**more)


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "valid string"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": ["a", 1]}, "stop.1", "valid string"),
        ({"tool_choice": "any"}, "tool_choice", "'auto', 'none' or 'required'"),
        ({"tool_choice": {"type": "function", "function": {"nam": "a"}}}, "tool_choice.function.name", "required"),
        ({"structured_outputs": {"json": "{" * (MAX_GRAMMAR + 1)}}, "structured_outputs.json", "characters"),
        ({"temperature": 9, "stop": ["a"] * 5}, "temperature", "less than or equal to 2"),
        ({"Temperature": 1}, "Temperature", "unknown or unsupported field"),
    ],
    ids=str,
)
def test_an_error_is_about_the_form_of_a_field_that_was_meant(more: Any, field: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body(**more)
    error = invalid_body_error(list(caught.value.errors()))
    assert error.param == field and said in str(error) and field in str(error)
