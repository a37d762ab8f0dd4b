"""Output contracts: what is read, and what counts as a fault."""

from __future__ import annotations

import pytest

from serve_apps.contracts import Raw, Tags

BOTH = Tags("SOLUTION", "ANSWER")
STATUS = Tags("STATUS", choices={"STATUS": ("correct", "incorrect")})


def test_a_well_formed_completion_has_fields_and_no_fault() -> None:
    parsed = BOTH.parse("<SOLUTION>2*3=6</SOLUTION>\n<ANSWER> 6 </ANSWER>")
    assert (parsed.fields, parsed.fault) == ({"solution": "2*3=6", "answer": "6"}, "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<SOLUTION>x</SOLUTION><ANSWER>6", "0 <ANSWER> blocks, expected 1"),
        ("<SOLUTION>x</SOLUTION><ANSWER>6</ANSWER><ANSWER>7</ANSWER>", "2 <ANSWER> blocks, expected 1"),
        ("<SOLUTION>x</SOLUTION><ANSWER> </ANSWER>", "<ANSWER> is empty"),
        ("so: <SOLUTION>x</SOLUTION><ANSWER>6</ANSWER>", "text outside the tags: 'so:'"),
        ("<ANSWER>6</ANSWER><SOLUTION>x</SOLUTION>", "tags out of order, expected SOLUTION, ANSWER"),
    ],
)
def test_a_broken_format_is_named(text: str, fault: str) -> None:
    assert BOTH.parse(text).fault == fault


def test_blocks_that_can_be_read_are_offered_even_where_the_format_is_broken() -> None:
    assert BOTH.parse("<SOLUTION>x</SOLUTION><ANSWER>6").fields == {"solution": "x", "answer": ""}


def test_a_choice_is_compared_in_lower_case_and_others_are_a_fault() -> None:
    assert STATUS.parse("<STATUS>Correct</STATUS>").fields == {"status": "correct"}
    assert STATUS.parse("<STATUS>maybe</STATUS>").fault == "<STATUS> is 'maybe', expected one of correct, incorrect"


def test_a_missing_verdict_is_a_fault_and_not_an_approval() -> None:
    parsed = STATUS.parse("looks fine")
    assert parsed.fault
    assert parsed.fields["status"] == ""


def test_raw_takes_anything_but_nothing() -> None:
    assert Raw().parse(" hello ").fields == {"text": "hello"}
    assert Raw().parse(" ").fault == "empty completion"


def test_choices_for_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="VERDICT"):
        Tags("STATUS", choices={"VERDICT": ("yes",)})
