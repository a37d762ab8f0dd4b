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


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("hepatitis a.", "Hepatitis A"),
        ("a cat", "cat"),
        ("A 'cat'", "cat"),
        ("a 5", "5"),
        ("An apple, a pear", "apple pear"),
        ("Beatles, The", "The Beatles"),
        ("7,200", "7200"),
        ("1,234.5", "1234.5"),
        ("$7.20", "7.20"),
        ("−5", "-5"),
        ("-$5", "(-5)"),
        ("5.", "5"),
        ("+5", "5"),
        ("20%", "20"),
        ("well-known", "wellknown"),
        ("the U.S.", "US"),
    ],
)
def test_articles_and_punctuation_make_no_difference(answer: str, reference: str) -> None:
    assert exact_match(answer, [reference]) == exact_match(reference, [answer]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A, B", "B"),
        ("A, B", "A"),
        ("A B", "B"),
        ("Hepatitis", "Hepatitis A"),
        ("7.20", "720"),
        ("7,20", "720"),
        (".5", "5"),
        ("-5", "5"),
        ("$-5", "$5"),
        ("x = -5", "x = 5"),
        ("1/2", "12"),
        ("10:30", "1030"),
        ("3-1", "31"),
    ],
)
def test_a_letter_that_is_a_name_and_what_is_a_part_of_a_number_make_one(one: str, other: str) -> None:
    assert exact_match(one, [other]) == exact_match(other, [one]) == 0
