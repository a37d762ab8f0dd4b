"""Rows of multiple choice: the choices are part of the prompt, the answer is a letter, and what is unclear is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.sources import load_tasks
from pipelines.tasks.task_fields import read_task
from serve_apps.tools.math_answer import is_correct
from serve_apps.tools.text_match import exact_match
from stores.types import Task

pytestmark = pytest.mark.fast

QUESTION = "Which city is the capital of France?"
CITIES = ["Rome", "Bern", "Paris", "Oslo"]
LINES = "A. Rome\nB. Bern\nC. Paris\nD. Oslo"
LETTERS = dict(zip("ABCD", CITIES, strict=True))


def task_of(**row: Any) -> Task:
    return read_task({"question": QUESTION, **row}, "f:1", "s")


@pytest.mark.parametrize(
    "row",
    [
        {"choices": CITIES, "answer": 2},
        {"choices": CITIES, "answer": 2.0},
        {"answer_choices": CITIES, "answer": 2},
        {"answer_options": CITIES, "answer": "C"},
        {"choices": CITIES, "answer": "2"},
        {"choices": CITIES, "answer": "C"},
        {"choices": CITIES, "answer": "(c)"},
        {"choices": CITIES, "answer": "C. Paris"},
        {"choices": CITIES, "answer": "\\boxed{C}"},
        {"choices": CITIES, "answer": ["Paris"]},
        {"choices": '["Rome", "Bern", "Paris", "Oslo"]', "reward_model": {"ground_truth": "C"}},
        {"options": LETTERS, "answer": "C"},
        {"options": LETTERS, "answer": "Paris", "answer_idx": "C", "meta_info": "step1"},
        {"options": {**LETTERS, "E": None}, "answer": "Paris"},
        {"options": {"a": "Rome", "b": "Bern", "c": "Paris", "d": "Oslo"}, "answer": "c"},
        {"options": [{"key": k, "value": v} for k, v in LETTERS.items()], "answer": "Paris"},
        {"options": CITIES, "answer": "C", "answer_index": 2},
        {"options": [f"{k}){v}" for k, v in LETTERS.items()], "correct": "C", "rationale": "It is Paris."},
        {"options": [f"({k}) {v}" for k, v in LETTERS.items()], "label": "C"},
        {"choices": {"text": CITIES, "label": list("ABCD")}, "answerKey": "C"},
        {"choices": {"text": CITIES, "label": list("1234")}, "answerKey": "3"},
        {"choices": {"text": CITIES, "label": list("1234")}, "answer": 3},
        {"opa": "Rome", "opb": "Bern", "opc": "Paris", "opd": "Oslo", "cop": 2, "exp": "It is Paris."},
        {**LETTERS, "answer": "C"},
        {"option_a": "Rome", "option_b": "Bern", "option_c": "Paris", "option_d": "Oslo", "answer": "Paris"},
        {"choices": CITIES, "answerKey": "C", "answer": "Because it is the seat of the government."},
    ],
)
def test_the_choices_are_in_the_prompt_and_the_letter_is_the_answer(row: dict[str, Any]) -> None:
    task = task_of(**row)
    assert task.prompt == f"{QUESTION}\n{LINES}"
    assert task.answers == ("C", "C. Paris", "Paris")


@pytest.mark.parametrize("reply", ["C", "(C)", "C.", "c", "C. Paris", "C) Paris", "**C**", "Paris"])
def test_a_reply_that_names_the_choice_is_right(reply: str) -> None:
    assert exact_match(reply, task_of(choices=CITIES, answer=2).answers) == 1.0


@pytest.mark.parametrize("reply", ["B", "B. Bern", "C. Rome", "2", "", "A, B, C or D"])
def test_another_reply_is_wrong(reply: str) -> None:
    references = task_of(choices=CITIES, answer=2).answers
    assert exact_match(reply, references) == 0.0 and not is_correct(reply, references)


@pytest.mark.parametrize("reply", ["C", "(C)", "The answer is C.", "\\boxed{C}", "C. Paris"])
def test_the_rules_of_mathematics_know_a_letter_too(reply: str) -> None:
    assert is_correct(reply, task_of(choices=CITIES, answer=2).answers)


def test_a_text_that_another_choice_is_written_like_is_no_answer() -> None:
    blood = task_of(options={"A": "B", "B": "A", "C": "AB", "D": "0"}, answer_idx="A", answer="B")
    assert blood.answers == ("A", "A. B")
    assert exact_match("B", blood.answers) == 0.0
    assert task_of(choices=["the cat", "cat", "dog"], answer=0).answers == ("A", "A. the cat")


def test_numbers_to_choose_from_are_counted_where_the_answer_is_a_number() -> None:
    assert task_of(choices=["0", "4", "2", "6"], answer=1).answers == ("B", "B. 4", "4")
    assert task_of(choices=["12", "13"], answer="13").answers[0] == "B"


@pytest.mark.parametrize("shown", ["A. Rome B. Bern C. Paris D. Oslo", "(A) Rome\n(B) Bern\n(C) Paris\n(D) Oslo"])
def test_choices_that_the_question_has_already_are_not_repeated(shown: str) -> None:
    task = read_task({"question": f"Which one? {shown}", "choices": CITIES, "answer": 2}, "f:1", "s")
    assert task.prompt == f"Which one? {shown}" and task.answers[0] == "C"


def test_one_question_with_other_choices_is_another_task() -> None:
    assert task_of(choices=CITIES, answer=2).task_id != task_of(choices=[*CITIES[:3], "Riga"], answer=2).task_id


@pytest.mark.parametrize("nothing", [None, [], "", float("nan")])
def test_a_row_without_choices_stays_a_question(nothing: Any) -> None:
    plain = task_of(answer="Paris")
    assert task_of(choices=nothing, answer="Paris") == plain
    assert plain.prompt == QUESTION and plain.answers == ("Paris",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"choices": CITIES, "answer": 4}, r"^f:1: answer = 4 names no choice of A\. Rome .*numbers count from 0"),
        ({"choices": CITIES, "answer": -1}, "answer = -1 names no choice"),
        ({"option1": "Rome", "option2": "Paris", "answer": 2}, r"^f:1: option1, option2: .*write them as one list"),
        ({"choice_0": "Rome", "choice_1": "Paris", "answer": "1"}, "choice_0, choice_1: data sets count such columns"),
        ({"opa": "Rome", "opb": "Bern", "cop": -1}, "cop = -1 names no choice"),
        ({"choices": CITIES, "answer": "Riga"}, r"answer = \('Riga',\) names no choice"),
        ({"choices": CITIES}, "none of answerKey, .* names no choice"),
        ({"choices": CITIES, "answer": ["Rome", "Paris"]}, "may mean A or C"),
        ({"choices": ["0", "2", "1"], "answer": "2"}, "may mean B or C"),
        ({"choices": [3, 2, 1], "answer": 1}, "answer = 1 may mean B or C"),
        ({"choices": ["Rome", "Rome"], "answer": "Rome"}, "may mean A or B"),
        ({"choices": CITIES, "answer": "Rome", "answer_idx": "C"}, "answer_idx = 'C'.* may mean A or C"),
        ({"choices": 4, "answer": "Paris"}, r"^f:1: choices = 4 is no list of choices .*another name"),
        ({"options": {"shuffle": True}, "answer": "Paris"}, r"options = \{'shuffle': True\} is no list"),
        ({"options": "a ) 38 , b ) 27 , c ) 30", "answer": "a"}, "options = .* is no list of choices"),
        ({"choices": ["Paris"], "answer": "Paris"}, "is no list of choices"),
        ({"choices": ["Paris", ""], "answer": "Paris"}, "is no list of choices"),
        ({"choices": ["Paris", None], "answer": "Paris"}, "is no list of choices"),
        ({"choices": {"text": CITIES, "label": ["A"]}, "answerKey": "A"}, "is no list of choices"),
        ({"choices": [["a"], ["b"]], "answer": 0}, "is no list of choices"),
    ],
)
def test_choices_that_are_not_understood_are_refused_with_value_and_fix(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(**row)


@pytest.mark.parametrize("field", ["passage", "context", "article", "table"])
def test_a_passage_comes_before_its_question(field: str) -> None:
    about = {field: "Anna went home. She slept."}
    assert read_task({"question": "What did she do?", "answer": "slept", **about}, "f:1", "s").prompt == (
        "Anna went home. She slept.\n\nWhat did she do?"
    )
    race = {"question": "She ...", "options": ["ate", "slept"], "answer": "B", **about}
    assert read_task(race, "f:1", "s").prompt == "Anna went home. She slept.\n\nShe ...\nA. ate\nB. slept"


def test_a_passage_that_the_prompt_has_already_is_not_repeated_and_documents_are_no_passage() -> None:
    row = {"prompt": "Anna slept. What did she do?", "answer": "slept", "context": "Anna slept."}
    assert read_task(row, "f:1", "s").prompt == "Anna slept. What did she do?"
    documents = {"title": ["Anna"], "sentences": [["Anna slept."]]}
    assert task_of(answer="Paris", context=documents) == task_of(answer="Paris")


def test_a_row_whose_picture_would_be_thrown_away_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^f:1: images: a prompt is text only; leave"):
        task_of(choices=CITIES, answer=2, images=[{"bytes": b"", "path": "a.png"}])
    assert task_of(answer="Paris", image=None, images=[]) == task_of(answer="Paris")


@pytest.mark.parametrize("label", [0, False, "0", 0.0])
def test_an_answer_that_is_labelled_as_wrong_is_no_reference(label: Any) -> None:
    with pytest.raises(ValueError, match=rf"^f:1: label = {label!r} beside answer = 'Rome' says that this is no right"):
        task_of(answer="Rome", label=label)
    assert task_of(answer="Paris", label=1) == task_of(answer="Paris")


def test_choices_are_read_from_tables(tmp_path: Path) -> None:
    rows = [
        {"question": "one", "options": {"A": "x", "B": "y", "C": "z"}, "answer_idx": "C"},
        {"question": "two", "options": {"A": "x", "B": "y", "C": None}, "answer_idx": "B"},
    ]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tasks = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert [(task.prompt, task.answers[0]) for task in tasks] == [
        ("one\nA. x\nB. y\nC. z", "C"),
        ("two\nA. x\nB. y", "B"),
    ]
