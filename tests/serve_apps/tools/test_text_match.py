"""Short answers, by words."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ("a U.S. state", "US state"),
        ("a T-shirt", "T-shirt"),
        ("and a B.A.", "and BA"),
        ("a Q&A session", "QA session"),
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
        ("A B.", "B"),
        ("Q&A session", "Q session"),
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


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("“Paris”", "Paris"),
        ("«Paris», …", "Paris"),
        ("「東京」。", "東京"),
        ("¿Qué?", "qué"),
        ("O’Brien", "O'Brien"),
        ("Taft–Hartley", "Taft-Hartley"),
        ("2010–2014", "2010-2014"),
        ("2010—2014", "2010-2014"),
        ("2010 – 2014", "2010-2014"),
        ("Hawaiʻi", "Hawai'i"),
        ("Paris—the city", "Paris, the city"),
        ("Cafe\u0301 Mu\u0308ller", "Café Müller"),
        ("Pa\u00adris\u200b", "Paris"),
        ("Paris\u00a0Texas", "Paris Texas"),
        ("ＵＳＡ", "USA"),
        ("Straße", "STRASSE"),
        ("–5", "-5"),
        ("-€5", "-$5"),
        ("€5", "5"),
        ("30°", "30"),
        ("10\u202f000", "10,000"),
        ("1½", "1 1/2"),
        ("H₂O", "H2O"),
        ("iPhone®", "iPhone"),
        ("C♯", "C#"),
        ("x ≤ 5", "x <= 5"),
    ],
)
def test_signs_beyond_ascii_make_no_difference(typed: str, plain: str) -> None:
    assert exact_match(typed, [plain]) == exact_match(plain, [typed]) == f1(typed, [plain]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C#", "C"),
        ("C++", "C"),
        ("C++", "C#"),
        ("C++11", "C11"),
        (".NET", "NET"),
        ("A+", "A"),
        ("A+", "A-"),
        ("A-", "A"),
        ("18+", "18"),
        ("–5", "5"),
        ("<5", ">5"),
        ("≤5", "<5"),
        ("A > B", "A < B"),
        ("x ≠ y", "x = y"),
        ("10²", "102"),
        ("½", "12"),
        ("1½", "11/2"),
        ("B♭", "B"),
    ],
)
def test_a_sign_that_makes_another_word_or_number_counts(one: str, other: str) -> None:
    assert exact_match(one, [other]) == exact_match(other, [one]) == 0
    assert f1(one, [other]) < 1


@pytest.mark.parametrize("wrapped", ["{}.", "({})", "**{}**", "“{}”", "the {}", "{}, "])
@pytest.mark.parametrize("name", ["C#", "C++", ".NET", "A+", "A-", "<5", "18+", "Yahoo!", "The Beatles!"])
def test_a_name_with_a_sign_is_found_in_every_wrapping(name: str, wrapped: str) -> None:
    assert exact_match(wrapped.format(name), [name.lower()]) == 1


@given(text=st.text(), form=st.sampled_from(["NFC", "NFD"]))
def test_a_text_equals_itself_in_every_canonical_form(text: str, form: Literal["NFC", "NFD"]) -> None:
    assert f1(unicodedata.normalize(form, text), [text]) == f1(text, [text])
