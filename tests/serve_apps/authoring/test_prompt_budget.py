"""What a prompt loses where there is no room, and what it never loses."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.prompt_budget import MARK, fit_prompt, shorten
from serve_apps.chat.tokenizer import ChatTokenizer

pytestmark = pytest.mark.fast

AGENT = Agent(prompt="Instruction first.\n{history}\n{evidence}\nQuestion: {question}", cut=("history", "evidence"))
INPUTS = {
    "history": " ".join(f"old{i}" for i in range(100)),
    "evidence": " ".join(f"new{i}" for i in range(50)),
    "question": "why?",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


def cut_to(tokenizer: ChatTokenizer, room: int) -> tuple[str, int, dict[str, int]]:
    messages, token_ids, cut = fit_prompt(AGENT, INPUTS, encode=tokenizer.encode_chat, room=room)
    assert token_ids == list(tokenizer.encode_chat(messages))
    return messages[0]["content"], len(token_ids), cut


def test_a_list_is_cut_as_the_template_writes_it(tokenizer: ChatTokenizer) -> None:
    notes = [TracedText.by(f"note {number}", number) for number in range(50)]
    inputs = {**INPUTS, "history": notes}
    messages, _, cut = fit_prompt(AGENT, inputs, encode=tokenizer.encode_chat, room=400)
    assert MARK in messages[0]["content"] and "'note 49']" in messages[0]["content"] and cut["history"] > 0


def test_a_prompt_that_fits_is_left_alone(tokenizer: ChatTokenizer) -> None:
    text, length, cut = cut_to(tokenizer, 10_000)
    assert text == AGENT.prompt.format(**INPUTS)
    assert cut == {}
    assert cut_to(tokenizer, length)[2] == {}


def test_the_middle_of_the_least_needed_input_goes_first(tokenizer: ChatTokenizer) -> None:
    _, length, _ = cut_to(tokenizer, 10_000)
    text, fitted, cut = cut_to(tokenizer, length - 40)
    assert length - 60 < fitted <= length - 40
    assert set(cut) == {"history"}
    assert text.startswith("Instruction first.\nold0 ") and text.endswith("Question: why?")
    assert MARK in text and "old99" in text and INPUTS["evidence"] in text
    assert len(INPUTS["history"]) - cut["history"] + len(MARK) == len(text.split("\n")[1])


def test_then_the_next_one_and_never_the_instruction_or_the_question(tokenizer: ChatTokenizer) -> None:
    bare = len(tokenizer.encode_chat(AGENT.messages({"history": "", "evidence": "", "question": "why?"})))
    text, length, cut = cut_to(tokenizer, bare + 60)
    assert length <= bare + 60
    assert cut["history"] == len(INPUTS["history"])
    assert 0 < cut["evidence"] < len(INPUTS["evidence"])
    assert "new49" in text
    text, length, cut = cut_to(tokenizer, bare - 1)
    assert (text, length) == ("Instruction first.\n\n\nQuestion: why?", bare), "more than the room: the caller stops"


@pytest.mark.parametrize(
    ("kept", "text"), [(10, "abcdefghij"), (99, "abcdefghij"), (4, f"a{MARK}hij"), (1, f"{MARK}j"), (0, "")]
)
def test_a_text_keeps_its_ends(kept: int, text: str) -> None:
    assert shorten("abcdefghij", kept) == text


def test_only_inputs_can_be_named() -> None:
    with pytest.raises(ValueError, match=r"Agent\.cut names \['histroy'\]"):
        Agent(prompt="{history}", cut=("histroy",))
