"""What a model says outside of its thoughts."""

from __future__ import annotations

import pytest

from serve_apps.authoring.contracts import OneOf, Tags, Thinking
from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.math_answer import is_correct

pytestmark = pytest.mark.fast

TAGS = [
    ("<think>", "</think>"),
    ("<Think>", "</THINK>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
]


@pytest.mark.parametrize(("opening", "closing"), TAGS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{0}41{1}40", "40"),
        ("41{1}40", "40"),
        ("{0}41", ""),
        ("40{0}41", ""),
        ("{0}a{1}b{0}41{1}40", "40"),
        ("{0}{0}41{1}40", "40"),
        ("40{0}41{1}", "40"),
        ("{0}39{1}40{0}41{1}\n", "40"),
        ("{0}41{1}", ""),
        ("41{1}", ""),
    ],
)
def test_thoughts_are_not_said(opening: str, closing: str, text: str, said: str) -> None:
    assert after_thinking(text.format(opening, closing)) == said


@pytest.mark.parametrize("text", ["40", " [think] 40", "I think, <a>so</a> 40", ""])
def test_a_text_without_thoughts_is_said(text: str) -> None:
    assert after_thinking(text) == text


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_an_answer_in_thoughts_is_not_paid(opening: str, closing: str) -> None:
    text = rf"{opening}\boxed{{41}}{closing}The answer is 40"
    assert (is_correct(text, ["41"]), is_correct(text, ["40"])) == (False, True)


@pytest.mark.parametrize("name", ["REASONING", "thought", "think"])
def test_a_field_of_a_contract_is_no_thought(name: str) -> None:
    text = f"<{name}>why</{name}><A>40</A>"
    assert Tags(name, "A").parse(text).fields == {name.lower(): "why", "a": "40"}
    assert not Tags(name, "A").parse(text).fault
    assert OneOf(name, "A").parse(f"<{name}>why</{name}>").fields["choice"] == name.lower()


def test_a_field_after_thoughts_is_no_thought() -> None:
    parsed = Thinking(Tags("REASONING", "A")).parse("<think>41</think><REASONING>why</REASONING><A>40</A>")
    assert (parsed.fields, parsed.fault) == ({"reasoning": "why", "a": "40"}, "")
