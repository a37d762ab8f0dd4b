"""Rows of data sets of code -> the tests that a program is judged by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.extensions.code_tasks.code_tests import Case, read_tests
from tests.pipelines.tasks.test_task_fields import task_of
from tests.pipelines.tasks.test_task_shapes import CODE, write
from tests.pipelines.tasks.test_tasks import load, written

pytestmark = pytest.mark.fast


CASES = [{"input": [1, 2], "output": 3}, {"input": [4, 5], "output": 9}]
CALLS = [Case(given=[1, 2], expected=3), Case(given=[4, 5], expected=9)]


@pytest.mark.parametrize(
    "beside",
    [
        {"tests": CASES, "fn_name": "f"},
        {"tests": {"inputs": [[1, 2], [4, 5]], "outputs": [3, 9], "fn_name": "f"}, "fn_name": "other"},
        {"tests": CASES, "function_name": "f"},
        {"tests": json.dumps(CASES), "metadata": {"func_name": "f"}},
        {"test_cases": CASES, "metadata": '{"func_name": "f"}', "extra_info": {"fn_name": "other"}},
        {"tests": CASES, "extra_info": {"fn_name": "f"}, "label": {"fn_name": "other"}},
        {"tests": CASES, "extra_info": '{"fn_name": "f"}'},
        {"tests": CASES, "label": {"fn_name": "f"}},
        {"private_tests": CASES, "function_name": "f"},
        {"extra_info": {"private_test_cases": CASES, "fn_name": "f"}},
        {"reward_model": {"ground_truth": CASES, "fn_name": "f"}},
        {"reward_model": {"answer": {"inputs": [[1, 2], [4, 5]], "outputs": [3, 9], "fn_name": "f"}}},
        {"reward_model": {"answer": json.dumps(CASES)}, "fn_name": "f"},
        {"answer": CASES, "fn_name": "f"},
        {"label": {"tests": CASES, "fn_name": "f"}},
        {"label": json.dumps({"inputs": [[1, 2], [4, 5]], "outputs": [3, 9], "fn_name": "f"})},
    ],
)
def test_a_functions_name_and_tests_are_found_wherever_a_row_has_them(tmp_path: Path, beside: dict[str, Any]) -> None:
    (task,) = load(written(tmp_path, {"problem": "p", **beside}))
    tests = read_tests(task.metadata["tests"], place="t")
    assert (tests.fn_name, list(tests.cases), tests.public, task.answers) == ("f", CALLS, (), ())


def test_a_rows_checker_reaches_its_tests(tmp_path: Path) -> None:
    cases = [{"input": "1 2", "output": "3"}]
    rows = [
        {"problem": "p", "tests": cases, "checker_type": "unordered_tokens"},
        {"problem": "q", "tests": cases, "checker_code": "def check(given, expected, actual): return True"},
        {"problem": "r", "private_tests": cases, "metadata": {"special_judge": True, "checker": "def check(*_): ..."}},
    ]
    tests = [read_tests(task.metadata["tests"], place="t") for task in load(written(tmp_path, *rows))]
    assert [t.checker for t in tests] == ["unordered_tokens", "custom", "custom"]
    assert tests[2].checker_code == "def check(*_): ..."


def test_tests_beside_public_ones_are_the_hidden_ones(tmp_path: Path) -> None:
    cases = [{"input": str(i), "output": str(i)} for i in range(3)]
    (task,) = load(written(tmp_path, {"problem": "p", "tests": cases, "public_tests": cases[:1]}))
    tests = read_tests(task.metadata["tests"], place="t")
    assert ([c.given for c in tests.public], [c.given for c in tests.cases]) == (["0"], ["1", "2"])


LONG_TESTS = '{"inputs": ["x"], "outputs": [%s]}' % ("1" * 5000)


@pytest.mark.parametrize(
    "row",
    [
        {"reward_model": {"ground_truth": LONG_TESTS}},
        {"reward_model": f'{{"ground_truth": {LONG_TESTS}}}'},
        {"extra_info": f'{{"tests": {LONG_TESTS}, "seed": 7}}'},
        {"extra_info": f'{{"private_tests": {LONG_TESTS}}}'},
        {"tests": LONG_TESTS},
    ],
)
def test_tests_with_integers_of_any_length_are_tests(row: dict[str, Any]) -> None:
    task = task_of(prompt="p", **row)
    assert task.answers == ()
    assert json.loads(json.dumps(dict(task.metadata))) == task.metadata, "a task can be written"
    (case,) = read_tests(task.metadata["tests"], place="f:1").cases
    assert (case.given, case.expected) == ("x", "1" * 5000)


@pytest.mark.parametrize("shape", CODE)
def test_the_tests_of_every_data_set_are_read(shape: str, tmp_path: Path) -> None:
    (task,) = load(write(tmp_path / "tasks.parquet", shape, 1))
    tests = read_tests(task.metadata["tests"], place="t")
    assert [(c.given, c.expected) for c in tests.cases] == [("1 2", "3"), ("4 5", "9")]
    assert len(tests.public) == (shape in ("lcb", "codecontests", "unitymas"))
