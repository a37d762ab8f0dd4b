"""Tool calls in the formats of Hermes, Qwen3-Coder, Llama 3 and Mistral: how they are told apart, read, and left as text."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.episode.scripted import ByteTokenizer
from serve_apps.openai_api.chat_request import Message
from serve_apps.openai_api.tool_calls import parse_tool_calls
from serve_apps.openai_api.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, OfferedTools, tool_format
from tests.small_tokenizers import FAMILIES, QWEN, build, template_of

pytestmark = pytest.mark.fast

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
CALLS = {
    "qwen": 'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "coder": "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "abcdefghi"}]',
}
NO_CALLS = {
    "qwen": [
        "I add.",
        '<tool_call>{"name": "steal", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>',
        "<tool_call>{",
        '{"name": "add"}',
    ],
    "coder": [
        "I add.",
        "<tool_call>\n<function=add>\n<parameter=a>\n1",
        "<tool_call>\n<function=steal>\n</function>\n</tool_call>",
        "<function=" * 20_000,
        "<tool_call><function=add>" + "<parameter=a></parameter>" * 2_500 + "</function></tool_call>",
    ],
    "llama": [
        "I add.",
        '{"a": 1}',
        '{"name": "steal", "parameters": {}}',
        '{"name": "add", "parameters": {"a": 1',
        '{"name": "add", "parameters": [1]}',
        '{"name": "add", "parameters": {"a": 1e400}}',
        "{" * 262_144,
    ],
    "mistral": [
        "I add.",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a"',
        '[TOOL_CALLS] [{"name": "steal", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": NaN}}]',
        "[TOOL_CALLS]" * 10_000,
        "[TOOL_CALLS]" + "[" * 60_000,
    ],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folders = {family: build(family, tmp_path_factory.mktemp("formats") / family) for family in FAMILIES}
    coder = build("qwen", tmp_path_factory.mktemp("formats") / "coder")
    (coder / "chat_template.jinja").write_text(QWEN + "{# <tool_call>\n<function=example_function_name> #}")
    return {name: ChatTokenizer(folder) for name, folder in {**folders, "coder": coder}.items()}


def offered(chat: ChatTokenizer) -> OfferedTools:
    return OfferedTools(tokenizer=chat, format=tool_format(chat), tools=[TOOL])


def test_template_and_vocabulary_say_the_format(chats: dict[str, ChatTokenizer]) -> None:
    named = {name: tool_format(chat) for name, chat in chats.items()}
    assert named == {
        "qwen": HERMES,
        "coder": QWEN3_CODER,
        "llama": LLAMA3_JSON,
        "mistral": MISTRAL,
        "gemma": HERMES,
        "deepseek": HERMES,
    }


def test_a_template_that_writes_calls_with_a_mark_that_is_no_token_has_the_format_that_needs_none(
    tmp_path: Path,
) -> None:
    folder = build("qwen", tmp_path / "merged")
    (folder / "chat_template.jinja").write_text(template_of("mistral"))
    assert tool_format(ChatTokenizer(folder)) == HERMES


def read_as_a_call(chat: ChatTokenizer, text: str) -> None:
    message = offered(chat).message(text, id_prefix="p")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x"}
    assert message["content"] == ("I add." if text.startswith("I add.") else None)
    assert call["id"].isalnum() and len(call["id"]) == 9, "an id that every template takes"
    back = Message.model_validate({k: v for k, v in message.items()}).for_template()
    answer = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    history = [{"role": "user", "content": "1 + 2?"}, back, answer]
    assert chat.encode_chat(history, tools=[TOOL]), "the call and its answer go back into the chat"


def stays_text(chat: ChatTokenizer, text: str) -> None:
    message = offered(chat).message(text, id_prefix="p")
    assert message == {"role": "assistant", "content": text, "refusal": None}


def test_a_call_in_the_format_of_hermes_is_read(chats: dict[str, ChatTokenizer]) -> None:
    read_as_a_call(chats["qwen"], CALLS["qwen"])
    for text in NO_CALLS["qwen"]:
        stays_text(chats["qwen"], text)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "add", "id": "c1", "arguments": {"a": 1}}', {"a": 1}),
        ('{"name": "add"}', {}),
        ('{"name": "add", "args": {"a": 1}}', None),
        ('{"name": "add", "a": 1}', None),
        ('{"name": "add", "parameters": "a"}', None),
        ('{"name": "add", "arguments": {}, "parameters": {"a": 1}}', None),
    ],
)
def test_arguments_under_another_name_are_not_lost(call: str, arguments: dict[str, Any] | None) -> None:
    text = f"<tool_call>{call}</tool_call>"
    rest, calls = parse_tool_calls(text, ("add",))
    assert [json.loads(found.arguments) for found in calls] == ([] if arguments is None else [arguments])
    assert rest == (text if arguments is None else "")


THOUGHTS = {
    # a completion around {call}, and whether the call counts
    "<think>I could {call}</think>No.": False,
    "I could {call}</think>No.": False,
    "<think>I could {call}": False,
    "<think>one</think>Yes.<think>or {call}</think>No.": False,
    "<think>unfinished <tool_call> here</think>{call}": True,
    "{call}<think>was that right": True,
    "{call}<think>and</think>done": True,
    "no thoughts to open</think>{call}": True,
}


@pytest.mark.parametrize("text", THOUGHTS)
def test_a_call_in_thoughts_is_none(text: str, chats: dict[str, ChatTokenizer]) -> None:
    tools = offered(chats["qwen"])
    whole = text.format(call=CALLS["qwen"])
    message = tools.message(whole, id_prefix="p")
    assert ("tool_calls" in message) is THOUGHTS[text]
    if not THOUGHTS[text]:
        assert message["content"] == whole and not tools.is_unreadable(whole)


def test_tags_of_thoughts_in_the_arguments_of_a_call_are_data(chats: dict[str, ChatTokenizer]) -> None:
    for value in ("<think>", "</think>", "<think></think>"):
        text = f'<tool_call>{{"name": "add", "arguments": {{"b": "{value}"}}}}</tool_call>'
        (call,) = offered(chats["qwen"]).message(text, id_prefix="p")["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"b": value}
    assert offered(chats["qwen"]).is_unreadable("<think>x</think><tool_call>{")


@pytest.mark.test
@pytest.mark.parametrize("family", ["coder", "llama", "mistral"])
def test_a_call_in_thoughts_is_none_in_other_formats(family: str, chats: dict[str, ChatTokenizer]) -> None:
    call = CALLS[family].removeprefix("I add.").strip()
    for before in ("<think>I could ", "I could "):
        stays_text(chats[family], f"{before}{call}</think>No.")
    read_as_a_call(chats[family], CALLS[family])
    message = offered(chats[family]).message(f"<think>hm</think>{call}", id_prefix="p")
    assert len(message["tool_calls"]) == 1 and message["content"] == "<think>hm</think>"


@pytest.mark.test
@pytest.mark.parametrize("family", ["coder", "llama", "mistral"])
def test_a_call_in_another_format_is_read_by_the_parser_of_vllm(family: str, chats: dict[str, ChatTokenizer]) -> None:
    read_as_a_call(chats[family], CALLS[family])
    began = time.process_time()
    for text in NO_CALLS[family]:
        stays_text(chats[family], text)
    assert time.process_time() - began < 10, "hostile text takes linear time"


@pytest.mark.test
def test_several_calls_of_one_completion_have_ids_of_their_own(chats: dict[str, ChatTokenizer]) -> None:
    two = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    calls = offered(chats["llama"]).message(two, id_prefix="p")["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["a"] for call in calls] == [1, 2]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    ("family", "text", "shown"),
    [
        ("qwen", 'Yes. <tool_call>{"na', "Yes. "),
        ("qwen", "Yes. <tool", "Yes. "),
        ("qwen", "1 < 2", "1 < 2"),
        ("coder", "Yes. <func", "Yes. "),
        ("mistral", "Yes. [TOOL_CA", "Yes. "),
        ("llama", 'Yes. {"name"', "Yes. "),
        ("llama", "Yes. <|py", "Yes. "),
    ],
)
def test_what_may_become_a_call_is_held_back(
    family: str, text: str, shown: str, chats: dict[str, ChatTokenizer]
) -> None:
    assert text[: offered(chats[family]).first_call(text)] == shown


def test_without_tools_nothing_is_a_call() -> None:
    none = OfferedTools(tokenizer=ByteTokenizer(), format=HERMES)
    assert none.message(CALLS["qwen"], id_prefix="p")["content"] == CALLS["qwen"]
    assert none.first_call(CALLS["qwen"]) == len(CALLS["qwen"])
    assert not none.needs_vllm and not none.is_unreadable(CALLS["qwen"])


def test_ids_and_missing_content_reach_the_template() -> None:
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}).for_template()
    assert asked["content"] is None
    function = {"name": "add", "arguments": {"a": 1}}
    assert asked["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    answer = Message.model_validate({"role": "tool", "content": "3", "tool_call_id": "call_1"}).for_template()
    assert answer == {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    parts = Message.model_validate(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert parts.for_template()["content"] == "ab"


def test_calls_of_hermes_are_read_without_vllm(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.small_tokenizers import build; "
        "from serve_apps.chat.tokenizer import ChatTokenizer; from serve_apps.openai_api.tool_formats import HERMES, OfferedTools; "
        "from serve_apps.gateway.calls import chat; from serve_apps.program import episode; "
        f"chat = ChatTokenizer(build('qwen', Path({str(tmp_path / 'q')!r}))); "
        f"tools = OfferedTools(tokenizer=chat, format=HERMES, tools=[{TOOL!r}]); "
        f"assert tools.message({CALLS['qwen']!r}, id_prefix='p')['tool_calls']; "
        "assert not tools.needs_vllm and 'vllm' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
