"""What a program may know of a task: nothing by which the reader finds answers or tests, wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelines.tasks.task_fields import read_task
from serve_apps.tools.reference_fields import (
    ANSWER_FIELDS,
    KEY_FIELDS,
    SPLIT_TEST_FIELDS,
    TEST_FIELDS,
    TRUTH_FIELDS,
    is_reference,
    public_task,
)
from stores.types import Task

pytestmark = pytest.mark.fast

SECRET = "xyzzy"
FIELDS = sorted({*ANSWER_FIELDS, *KEY_FIELDS, *TEST_FIELDS, *SPLIT_TEST_FIELDS, *TRUTH_FIELDS})


def shown(metadata: Any) -> str:
    return json.dumps(public_task(Task(task_id="t", prompt="p", answers=(SECRET,), metadata=metadata)))


def within(field: str, value: Any) -> Any:
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("field", FIELDS)
def test_no_name_of_the_reader_is_shown_at_any_depth(field: str) -> None:
    for value in (SECRET, [SECRET], {"target": SECRET}, [{"input": "1", "output": SECRET}]):
        held = within(field, value)
        places = [held, {"settings": held}, {"rooms": [[held]]}, {"text": json.dumps({"a": [held]})}]
        places += [{outer: held} for outer in ("metadata", "extra_info", "reward_model", "env_kwargs")]
        places += [{"text": json.dumps({"text": json.dumps(held)})}, {"text": f"  {json.dumps([held])}"}]
        assert not [place for place in places if SECRET in shown(place)]


def test_an_integer_of_any_length_in_a_text_hides_no_reference() -> None:
    long = "1" * 5000
    text = f'{{"a": {long}, "answer": "{SECRET}"}}'
    assert shown({"text": text}) == shown({"text": f'{{"a": {long}}}'})
    assert public_task(Task(task_id="t", prompt="p", answers=(), metadata={"text": long}))["metadata"] == {"text": long}


def test_what_the_reader_puts_into_a_task_is_not_shown() -> None:
    row = {
        "data_source": "made",
        "prompt": [{"role": "user", "content": "3+4?"}],
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"answer": "3+4=7", "index": 3, "level": {"name": "easy", "Solutions": "3+4=7"}},
    }
    assert public_task(read_task(row, "f:1", "s"))["metadata"] == {"index": 3, "level": {"name": "easy"}}
    code = {"problem": "p", "tests": [{"input": "1", "output": SECRET}], "extra_info": {"checker_code": SECRET, "a": 1}}
    task = read_task(code, "f:1", "s")
    assert SECRET in json.dumps(dict(task.metadata)) and public_task(task)["metadata"] == {"a": 1}


@pytest.mark.parametrize(
    "name",
    ["Answer", "answers", "final_answer", "groundTruth", "ground-truths", "GROUND_TRUTH", "canonical_solution", "answer_1",
     "hidden_tests", "inputOutput", "expected_output", "reward_model", "label"],
)  # fmt: skip
def test_names_that_mean_a_reference_are_known(name: str) -> None:
    assert is_reference(name)


@pytest.mark.parametrize(
    "name", ["answer_type", "seed", "split", "target_language", "output_format", "index", "", "7", "world"]
)
def test_other_names_are_not(name: str) -> None:
    assert not is_reference(name)


@pytest.mark.parametrize("text", ["[1] is a footnote", "{not JSON", '{"a": 1.50}', "[]", "plain"])
def test_other_text_is_shown_as_it_is(text: str) -> None:
    assert public_task(Task(task_id="t", prompt="p", answers=(), metadata={"text": text}))["metadata"] == {"text": text}


def test_what_is_too_deep_to_be_checked_is_not_shown() -> None:
    deep: Any = {"answer": SECRET}
    for _ in range(500):
        deep = {"a": deep}
    assert SECRET not in shown(deep)
    assert SECRET not in shown({"text": "[" * 100_000 + json.dumps({"answer": SECRET})})
