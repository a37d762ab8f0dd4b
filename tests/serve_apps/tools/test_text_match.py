"""Short answers, by words."""

from __future__ import annotations

import pytest

from serve_apps.tools.text_match import exact_match, f1

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("choice", ["A", "B"])
@pytest.mark.parametrize(
    "written", ["{}", "{}.", "({})", "{})", "**{}**", " {}\n", "the {}", "<think>C or D</think>{}"]
)
def test_a_choice_may_be_the_letter_that_is_an_article(choice: str, written: str) -> None:
    answer = written.format(choice)
    assert (exact_match(answer, [choice]), f1(answer, [choice])) == (1, 1)
    other = "B" if choice == "A" else "A"
    assert (exact_match(answer, [other]), f1(answer, [other])) == (0, 0)


@pytest.mark.parametrize(
    ("answer", "reference", "em"),
    [
        ("The", "the", 1),
        ("An", "a", 0),
        ("+", "+", 1),
        ("+", "-", 0),
        ("the cat", "cat", 1),
        ("", "A", 0),
        ("<think>Paris</think>Rome", "Rome", 1),
        ("<think>Paris</think>Rome", "Paris", 0),
        ("<think>Paris", "Paris", 0),
        ("Paris</think>Rome", "Paris", 0),
    ],
)
def test_what_is_said_is_compared_by_its_words(answer: str, reference: str, em: float) -> None:
    assert exact_match(answer, [reference]) == em
    assert f1(answer, [reference]) == em


def test_thoughts_do_not_lower_f1() -> None:
    assert f1("<think>Paris or Rome?</think>in Rome", ["Rome"]) == pytest.approx(2 / 3)
