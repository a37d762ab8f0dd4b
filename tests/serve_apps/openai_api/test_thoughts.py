"""What a model thinks and what it says: by the marks of its template, by a parser of vLLM, whole and while it grows."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest

from serve_apps.authoring.parsers import Parsers
from serve_apps.chat.tokenizer import ChatTokenizer, load_tokenizer
from serve_apps.openai_api.answer_reader import (
    KNOWN_MARKS,
    ThoughtReader,
    Thoughts,
    answer_format,
)
from serve_apps.openai_api.tool_formats import LLAMA3_JSON
from tests.small_tokenizers import QWEN, build

THINK = KNOWN_MARKS[0]
THINKING_QWEN = QWEN + "{# <think>\n</think> #}"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = build("qwen", tmp_path_factory.mktemp("thoughts") / "qwen")
    (folder / "chat_template.jinja").write_text(THINKING_QWEN)
    return ChatTokenizer(folder)


@pytest.mark.fast
def test_thoughts_are_seen_in_the_end_of_the_prompt() -> None:
    assert ThoughtReader.of("<|im_start|>assistant\n<think>\n", THINK).thoughts == "begun"
    assert ThoughtReader.of("<|im_start|>assistant\n", THINK).thoughts == "possible"
    assert ThoughtReader.of("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK).thoughts == "none", (
        "they are turned off"
    )
    assert ThoughtReader.of("<|im_start|>assistant\n<think>\n", None).thoughts == "none"


@pytest.mark.fast
def test_the_template_shows_the_marks(tmp_path: Path) -> None:
    chats = {family: ChatTokenizer(build(family, tmp_path / family)) for family in ("qwen", "deepseek")}
    found = {family: answer_format(chat, Parsers()).thoughts for family, chat in chats.items()}
    assert found == {"qwen": None, "deepseek": THINK}


@pytest.mark.fast
def test_tokenizers_of_old_versions_are_let_go(tmp_path: Path) -> None:
    model = build("qwen", tmp_path / "model")
    seen = []
    for version in range(18):
        folder = shutil.copytree(model, tmp_path / f"v{version}")
        tokenizer = load_tokenizer(str(folder))
        answer_format(tokenizer, Parsers())
        seen.append(weakref.ref(tokenizer))
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True] + [False] * 16


CASES: list[tuple[Thoughts, str, str | None, str]] = [
    ("none", "<think>a</think>b", None, "<think>a</think>b"),
    ("possible", "b", None, "b"),
    ("possible", "b <think>a</think>", None, "b <think>a</think>"),
    ("possible", "\n <think>a</think>\n\nb", "a", "\n\nb"),
    ("possible", "<think>a", "a", ""),
    ("possible", "<thin", None, "<thin"),
    ("possible", "  ", None, "  "),
    ("begun", "a</think>b", "a", "b"),
    ("begun", "<think>a</think>b", "a", "b"),
    ("begun", "a", "a", ""),
    ("begun", "a</thi", "a</thi", ""),
    ("begun", "a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
    ("begun", "", "", ""),
]


@pytest.mark.fast
@pytest.mark.parametrize(("thoughts", "text", "thought", "said"), CASES)
def test_a_completion_is_split_and_what_was_shown_while_it_grew_is_never_taken_back(
    thoughts: Thoughts, text: str, thought: str | None, said: str
) -> None:
    reader = ThoughtReader(marks=THINK, thoughts=thoughts)
    assert reader.split(text) == (thought, said)
    for end in range(len(text) + 1):
        growing_thought, growing_said = reader.split(text[:end], is_growing=True)
        assert (thought or "").startswith(growing_thought or "") and said.startswith(growing_said)


@pytest.mark.fast
def test_thoughts_are_counted_in_tokens(qwen: ChatTokenizer) -> None:
    possible = ThoughtReader(marks=THINK, thoughts="possible")
    begun = ThoughtReader(marks=THINK, thoughts="begun")
    ids = qwen.encode_completion("<think>two numbers</think>13")
    close = ids.index(qwen.encode("</think>")[0])
    assert possible.num_tokens(qwen, ids) == begun.num_tokens(qwen, ids) == close + 1
    assert begun.num_tokens(qwen, ids[:close]) == close, "thoughts that were cut"
    assert possible.num_tokens(qwen, qwen.encode_completion("13")) == 0
    assert ThoughtReader(marks=None, thoughts="none").num_tokens(qwen, ids) is None


@pytest.mark.test
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("text", ["a\n</think>\n\nb", "<think>\na</think>b", "<think>a", "a</think>"])
def test_a_prompt_that_begins_to_think_is_read_as_by_vllms_parser(qwen: ChatTokenizer, name: str, text: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    parser = ReasoningParserManager.get_reasoning_parser(name)(qwen.hugging_face)
    thoughts, said = parser.extract_reasoning(text, ChatCompletionRequest(messages=[{"role": "user", "content": "x"}]))
    marks = answer_format(qwen, Parsers(reasoning=name)).thoughts
    assert marks is not None and (marks.begin, marks.end) == (THINK.begin, THINK.end)
    assert ThoughtReader.of("assistant\n<think>\n", marks).split(text) == (thoughts, said or "")


@pytest.mark.test
def test_a_parser_that_vllm_does_not_have_or_that_does_not_fit_is_refused(qwen: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serve.reasoning_parser = 'qwen9': vLLM has no such parser; it has .*qwen3"):
        answer_format(qwen, Parsers(reasoning="qwen9"))
    with pytest.raises(ValueError, match=r"serve.tool_parser = 'mine': vLLM has no such parser; it has .*hermes"):
        answer_format(qwen, Parsers(tool="mine"))
    for named in ("deepseek_v3", "llama3_json", "mistral"):
        with pytest.raises(ValueError, match=rf"serve.tool_parser = '{named}' does not fit the model: .*token"):
            answer_format(qwen, Parsers(tool=named))
    assert answer_format(qwen, Parsers(tool="pythonic")).tools.name == "pythonic"
    llama = ChatTokenizer(build("llama", tmp_path / "llama"))
    with pytest.raises(ValueError, match=r"serve.reasoning_parser = 'deepseek_r1' does not fit the model: .*tokens"):
        answer_format(llama, Parsers(reasoning="deepseek_r1"))
    with pytest.raises(ValueError, match=r"serve.reasoning_parser = 'cohere_command3' does not fit the model"):
        answer_format(llama, Parsers(reasoning="cohere_command3"))
    for name in ("mistral", "deepseek_v3", "openai", "cohere_command3"):  # two without their tokens, two stubs
        with pytest.raises(ValueError, match=f"serve.tool_parser = '{name}' does not fit the model"):
            answer_format(llama, Parsers(tool=name))
    assert answer_format(llama, Parsers(tool="llama3_json")).tools == LLAMA3_JSON
    assert answer_format(llama, Parsers(tool="pythonic")).tools.name == "pythonic"
    with pytest.raises(ValueError, match=r"'openai_gptoss' (splits at more|does not fit)"):
        answer_format(qwen, Parsers(reasoning="openai_gptoss"))
    assert answer_format(qwen, Parsers(reasoning="none")).thoughts is None
