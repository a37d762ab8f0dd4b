"""Forms of answers are tried in a process that may be killed, before any engine sees them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.openai_api import constraints
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.constraints import FormProcess, form_process, tried_constraint
from serve_apps.openai_api.protocol import ApiError

pytestmark = [pytest.mark.nightly, pytest.mark.anyio]

THOUSANDS_OF_RULES = "\n".join(
    ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1} | [a-z]" for i in range(2000)), 'r2000 ::= "a"']
)


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


async def refusal(process: FormProcess, model: Path, request: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        await process.constraint({"tokenizer": str(model), "parsers": {}, "thoughts": "none", "request": request})
    assert caught.value.status == 400
    return str(caught.value)


async def test_a_form_that_takes_too_much_is_refused_and_the_next_is_made(tiny_model: Path) -> None:
    process = FormProcess()

    async def constraint(request: dict[str, Any]) -> str:
        return await process.constraint(
            {"tokenizer": str(tiny_model), "parsers": {}, "thoughts": "none", "request": request}
        )

    try:
        usual = await constraint(schema({"type": "object"}))
        assert usual.startswith('{"json": {"type": "object"}')
        hostile = {"structured_outputs": {"grammar": THOUSANDS_OF_RULES}}
        assert "it takes more than 2 s to compile: simplify it" in await refusal(process, tiny_model, hostile)
        long = {"structured_outputs": {"regex": "(a|b)*c" * 9000}}
        said = await refusal(process, tiny_model, long)
        assert "this form cannot be used" in said and "simplify it" in said
        said = await refusal(process, tiny_model, schema({"type": 7}))
        assert "Type should be a string" in said and "cpp" not in said
        assert process._process is not None and process._process.poll() is None, "no form has ended it"
        assert '"regex": "[0-9]+"' in await constraint({"structured_outputs": {"regex": "[0-9]+"}})
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        assert "this form cannot be used" in await refusal(process, tiny_model, long), "it is remembered"
        assert '"regex": "[0-7]+"' in await constraint({"structured_outputs": {"regex": "[0-7]+"}}), (
            "another one starts"
        )
    finally:
        process.close()


async def test_a_form_is_made_for_a_model_whose_folder_a_cache_has_dropped(tiny_model: Path, tmp_path: Path) -> None:
    cached = shutil.copytree(tiny_model, tmp_path / "cached")
    tokenizer = ChatTokenizer(cached)
    shutil.rmtree(cached)
    chat = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}]}
    request = ChatRequest.model_validate(chat | schema({"type": "integer"}))
    try:
        assert (await tried_constraint(request, tokenizer)).startswith('{"json": {"type": "integer"}')
    finally:
        form_process().close()


async def test_a_process_that_does_not_answer_is_killed_and_the_form_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "ANSWER_S", 0.01)
    process = FormProcess()
    said = await refusal(process, tiny_model, schema({"type": "object"}))
    assert "could not be made within 0.01 s" in said and process._process is None


@pytest.mark.test
async def test_too_many_characters_are_refused_before_anything_starts(tiny_model: Path) -> None:
    process = FormProcess()
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"description": "x" * 60_000}}}
        for i in range(4)
    ]
    said = await refusal(process, tiny_model, {"tools": tools, "tool_choice": "required"})
    assert "and at most 200000 are accepted" in said and process._process is None
