"""What a request says its answer must look like, against xgrammar itself, which vLLM constrains by."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.openai_api import constraints, form_process
from serve_apps.openai_api.answer_reader import KNOWN_MARKS, ThoughtReader, Thoughts
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.constraints import MAX_WAITING, FormProcess, constraint_of
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.tool_formats import OfferedTools, tool_format
from tests.small_tokenizers import QWEN, build

pytestmark = pytest.mark.test

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(build("qwen", tmp_path_factory.mktemp("constraints") / "qwen"))


def constraint(tokenizer: ChatTokenizer, thoughts: Thoughts = "none", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "6*7?"}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages} | more)
    tools = OfferedTools(tokenizer=tokenizer, format=tool_format(tokenizer), tools=request.callable_tools)
    return constraint_of(request, tools, ThoughtReader(marks=KNOWN_MARKS[0], thoughts=thoughts))


def takes(tokenizer: ChatTokenizer, arguments: dict[str, Any], text: str) -> bool:
    """Whether a grammar takes a whole text and may end there."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.hugging_face)
    compiler = xgrammar.GrammarCompiler(info)
    (kind,) = arguments
    if kind == "json":
        grammar = compiler.compile_json_schema(json.dumps(arguments["json"]))
    elif kind == "json_object":
        grammar = compiler.compile_builtin_json_grammar()
    else:
        grammar = compiler.compile_structural_tag(arguments["structural_tag"])
    matcher = xgrammar.GrammarMatcher(grammar)
    if not matcher.accept_string(text):
        return False
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(bitmask)
    return all(bool(bitmask[0, stop // 32] >> (stop % 32) & 1) for stop in info.stop_token_ids)


def test_vocabularies_of_old_versions_are_let_go(qwen: ChatTokenizer, tmp_path: Path) -> None:
    for version in range(18):
        form_process._vocabulary(str(shutil.copytree(qwen.folder, tmp_path / f"v{version}")))
    assert form_process._vocabulary.cache_info().currsize == 16


def called(name: str, arguments: str = '{"answer": 42}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_required_call_is_one_of_the_tools_in_the_models_own_format(qwen: ChatTokenizer) -> None:
    required = constraint(qwen, tools=[tool("add"), tool("sub")], tool_choice="required")
    assert takes(qwen, required, called("add")) and takes(qwen, required, called("sub") + called("add"))
    for text in ("I add.", called("rob"), called("add", '{"answer": "many"}'), called("add") + " Done.", ""):
        assert not takes(qwen, required, text), text
    single = constraint(qwen, tools=[tool("add")], tool_choice="required", parallel_tool_calls=False)
    assert takes(qwen, single, called("add")) and not takes(qwen, single, called("add") + called("add"))
    named = {"type": "function", "function": {"name": "sub"}}
    only_sub = constraint(qwen, tools=[tool("add"), tool("sub")], tool_choice=named)
    assert takes(qwen, only_sub, called("sub")) and not takes(qwen, only_sub, called("add"))


def test_a_form_is_vllms_own_argument_and_beside_tools_the_form_or_a_call(qwen: ChatTokenizer) -> None:
    assert constraint(qwen) == constraint(qwen, tools=[tool("add")]) == {}
    assert constraint(qwen, response_format={"type": "json_object"}) == {"json_object": True}
    assert constraint(qwen, **FORM) == {"json": SCHEMA}
    assert constraint(qwen, **FORM, tools=[tool("add")], tool_choice="none") == {"json": SCHEMA}
    assert constraint(qwen, structured_outputs={"regex": "[0-9]+", "json_object": False}) == {"regex": "[0-9]+"}
    either = constraint(qwen, **FORM, tools=[tool("add")])
    assert takes(qwen, either, '{"answer": 42}') and takes(qwen, either, called("add"))
    assert not takes(qwen, either, "42")


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        ({"json": SCHEMA}, '{"answer": 42}', '{"answer": "x"}'),
        ({"json": json.dumps(SCHEMA)}, '{"answer": 42}', "{}"),
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": "[0-9]+"}, "42", "x"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'root ::= "a" "b"'}, "ab", "a"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_model_may_think_before_what_is_asked_for(qwen: ChatTokenizer, asked: Any, right: str, wrong: str) -> None:
    possible = constraint(qwen, "possible", structured_outputs=asked)
    assert takes(qwen, possible, right) and takes(qwen, possible, f"<think>\nhm {wrong}\n</think>\n\n{right}")
    assert not takes(qwen, possible, wrong) and not takes(qwen, possible, "<think>hm")
    begun = constraint(qwen, "begun", structured_outputs=asked)
    assert takes(qwen, begun, f"hm\n</think>\n\n{right}") and not takes(qwen, begun, right)
    assert not takes(qwen, begun, f"hm</think>{wrong}")


def test_what_has_no_grammar_is_refused_by_name(tmp_path: Path, qwen: ChatTokenizer) -> None:
    mistral = ChatTokenizer(build("mistral", tmp_path / "mistral"))
    with pytest.raises(ApiError, match="vLLM has no grammar of the format 'mistral'"):
        constraint(mistral, tools=[tool("add")], tool_choice="required")
    for text in ("{", "[1]"):
        with pytest.raises(ApiError, match=r"structured_outputs.json is not the JSON of an object"):
            constraint(qwen, "begun", structured_outputs={"json": text})


def test_calls_of_qwen_coder_and_llama_are_forced_in_their_words(tmp_path: Path) -> None:
    coder = build("qwen", tmp_path / "coder")
    (coder / "chat_template.jinja").write_text(QWEN + "{# <tool_call>\n<function=example_function_name> #}")
    tokenizer = ChatTokenizer(coder)
    required = constraint(tokenizer, tools=[tool("add")], tool_choice="required")
    text = "<tool_call>\n<function=add>\n<parameter=answer>\n42\n</parameter>\n</function>\n</tool_call>"
    assert takes(tokenizer, required, text)
    offered = OfferedTools(tokenizer=tokenizer, format=tool_format(tokenizer), tools=[tool("add")])
    (call,) = offered.message(text, id_prefix="x")["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"answer": 42}, "what is forced is also read"
    llama = ChatTokenizer(build("llama", tmp_path / "llama"))
    required = constraint(llama, tools=[tool("add")], tool_choice="required")
    assert takes(llama, required, '{"name": "add", "parameters": {"answer": 42}}')


@pytest.mark.anyio
async def test_equal_forms_at_once_are_made_once_and_what_was_not_tried_is_not_remembered() -> None:
    process, asked = FormProcess(), list[str]()

    def ask(line: str) -> dict[str, Any]:
        asked.append(line)
        time.sleep(0.01)
        if "bad" in line:
            raise ApiError(400, "not within 120 s", code="invalid_value")
        return {"constraint": "{}"}

    process.ask = ask  # type: ignore[method-assign]
    leaves = asyncio.ensure_future(process.constraint({"form": "same"}))
    await asyncio.sleep(0)
    leaves.cancel()
    told = await asyncio.gather(*(process.constraint({"form": "same"}) for _ in range(2 * MAX_WAITING)))
    assert told == ["{}"] * 2 * MAX_WAITING and len(asked) == 1
    others = (process.constraint({"form": i}) for i in range(MAX_WAITING + 1))
    *_, last = await asyncio.gather(*others, return_exceptions=True)
    assert isinstance(last, ApiError) and last.status == 429
    assert await process.constraint({"form": MAX_WAITING}) == "{}"
    patient = (process.constraint({"form": -1 - i}, is_patient=True) for i in range(2 * MAX_WAITING))
    assert await asyncio.gather(*patient) == ["{}"] * 2 * MAX_WAITING
    for _ in range(2):
        with pytest.raises(ApiError, match="not within"):
            await process.constraint({"form": "bad"})
    assert len(asked) == 1 + MAX_WAITING + 1 + 2 * MAX_WAITING + 2


@pytest.mark.anyio
async def test_a_form_that_a_busy_machine_did_not_try_may_be_sent_again(
    qwen: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_started", lambda: None)  # this process answers
    monkeypatch.setattr(constraints, "_answer", lambda _, line: form_process.answer_for(json.loads(line)))
    process, asked = FormProcess(), {"tokenizer": qwen.folder, "parsers": {}, "thoughts": "none", "request": FORM}
    with monkeypatch.context() as busy:
        busy.setattr(form_process, "TRIAL_S", 0.0)
        with pytest.raises(ApiError, match="this machine is too busy: try again later") as caught:
            await process.constraint(asked)
    assert caught.value.status == 503 and caught.value.headers == {"Retry-After": "2"}
    assert json.loads(await process.constraint(asked))["json"] == SCHEMA
