"""Tests of code tasks in every shape of the field, and what they are compared by."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from pipelines.extensions.code_tasks.checkers import has_same_tokens, is_right_output, is_right_value
from pipelines.extensions.code_tasks.code_tests import Case, CodeTests, expand_batched, foreign_modules, read_tests

pytestmark = pytest.mark.fast

ADD = [Case(given="1 2", expected="3"), Case(given="4 5", expected="9")]
CALLS = [Case(given=[1, 2], expected=3), Case(given=[[4], "x"], expected=[5])]


def packed(tests: Any) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


@pytest.mark.parametrize(
    "raw",
    [
        [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}],
        [{"stdin": "1 2", "stdout": "3"}, {"stdin": "4 5", "stdout": "9"}],
        {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]},
        {"input": ["1 2", "4 5"], "output": ["3", "9"]},
        {"tests": {"inputs": [["1 2"], ["4 5"]], "outputs": [["3"], ["9"]]}},
        {"input_output": json.dumps({"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]})},
        json.dumps(json.dumps([{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}])),
        {"private_test_cases": packed([{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}])},
        [
            {"input": "1 2", "output": "3", "type": "stdin_stdout", "metadata": {"func_name": None}},
            {"input": "4 5", "output": "9"},
        ],
    ],
)
def test_every_shape_of_programs_gives_the_same_cases(raw: Any) -> None:
    tests = read_tests(raw, place="row 1")
    assert (list(tests.cases), tests.public, tests.fn_name, tests.checker) == (ADD, (), "", "standard")


@pytest.mark.parametrize(
    ("fn_name", "given"), [("", "3\n1 2 3"), ("mul", ["3", "1 2 3"])], ids=["lines of a program", "arguments"]
)
def test_one_test_of_several_inputs_and_a_text_is_one_case(fn_name: str, given: Any) -> None:
    tests = read_tests({"input": ["3", "1 2 3"], "output": "42"}, place="row 1", fn_name=fn_name)
    assert tests.cases == (Case(given=given, expected="42"),)


@pytest.mark.parametrize(
    "raw",
    [
        {"inputs": [[1, 2], [[4], "x"]], "outputs": [3, [5]], "fn_name": "f"},
        {"inputs": ["1\n2", '[4]\n"x"'], "outputs": ["3", "[5]"], "function_name": "f"},
        [
            {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}},
            {"input": "[4]\nx", "output": "[5]"},
        ],
        {
            "metadata": '{"func_name": "f"}',
            "private_test_cases": json.dumps(
                [{"input": "1\n2", "output": "3"}, {"input": '[4]\n"x"', "output": "[5]"}]
            ),
        },
    ],
)
def test_every_shape_of_functions_gives_the_same_cases(raw: Any) -> None:
    tests = read_tests(raw, place="row 1")
    assert (list(tests.cases), tests.fn_name) == (CALLS, "f")


LONG = "1" * 5000


@pytest.mark.parametrize(
    ("given", "expected", "case"),
    [
        (["11", "1"], "100", Case(given=["11", "1"], expected="100")),
        (["1.5"], "[1]", Case(given=["1.5"], expected="[1]")),
        ([1], "true", Case(given=[1], expected="true")),
        (['"x"'], '"x"', Case(given=['"x"'], expected='"x"')),
        ([None], ["null"], Case(given=[None], expected=["null"])),
        ('"11"\n"1"', '"100"', Case(given=["11", "1"], expected="100")),
        ("11\n1", "100", Case(given=[11, 1], expected=100)),
        ("nums = [1], k = 2", "3", Case(given=[[1], 2], expected=3)),
        ("nums = [1]\nk = 2", "3", Case(given=[[1], 2], expected=3)),
        ('nums = [1,\n 2], s = "a, b = c"', "True", Case(given=[[1, 2], "a, b = c"], expected=True)),
        ("root = [1,null,2], ok = false", "[(1, 'x')]", Case(given=[[1, None, 2], False], expected=[[1, "x"]])),
        ("x = -1.5", "None", Case(given=[-1.5], expected=None)),
        ('x = {"1": [2]}', "{1: 2, None: (3,)}", Case(given=[{"1": [2]}], expected={"1": 2, "null": [3]})),
        (
            f'n = {LONG}, m = [-{LONG}], s = "{LONG}"',
            f"({LONG}, 'x')",
            Case(given=[Decimal(LONG), [Decimal(f"-{LONG}")], LONG], expected=[Decimal(LONG), "x"]),
        ),
        ({"nums": [1], "k": 2}, 3, Case(given=[{"nums": [1], "k": 2}], expected=3)),
        (f"{LONG}\n[-{LONG}]", LONG, Case(given=[Decimal(LONG), [Decimal(f"-{LONG}")]], expected=Decimal(LONG))),
    ],
)
def test_data_of_a_call_stay_what_they_are_and_text_is_read(given: Any, expected: Any, case: Case) -> None:
    more = {"input": [0], "output": 0}
    tests = read_tests({"tests": [{"input": given, "output": expected}, more], "fn_name": "f"}, place="row 1")
    assert tests.cases[0] == case
    assert [type(value) for value in tests.cases[0].given] == [type(value) for value in case.given]


def test_named_arguments_in_another_order_are_the_same_input() -> None:
    raw = {
        "public_tests": [{"input": "nums = [1], k = 2", "output": "3"}],
        "tests": [{"input": "k = 2, nums = [1]", "output": "3"}, {"input": "k = 4, nums = [5]", "output": "9"}],
        "fn_name": "f",
    }
    (case,) = read_tests(raw, place="row 1").cases
    assert (case.given, case.names) in [([4, [5]], ("k", "nums")), ([[5], 4], ("nums", "k"))]


def test_a_long_integer_is_one_case_of_a_program() -> None:
    (case,) = read_tests(f'[{{"input": {LONG}, "output": -{LONG}}}]', place="row 1").cases
    assert case == Case(given=LONG, expected=f"-{LONG}")


def test_generated_tests_of_code_contests_are_hidden_ones() -> None:
    raw = {
        "public_tests": {"input": ["1 2"], "output": ["3"]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["1 2", "4 5"], "output": ["3", "9"]},
    }
    tests = read_tests(raw, place="row 1")
    assert (list(tests.public), list(tests.cases)) == (ADD[:1], ADD[1:])


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import numpy as np", ["numpy"]),
        ("Begin with:\nfrom numpy.linalg import norm\n  import pandas", ["numpy", "pandas"]),
        ("import math\nfrom typing import List\nimport os.path", []),
        ("Goods: import duties are due.\nfrom the first line on\nimport goods only", []),
    ],
)
def test_modules_that_a_sandbox_lacks_are_named(text: str, modules: list[str]) -> None:
    assert foreign_modules(text) == modules


def test_a_test_that_is_shown_never_pays() -> None:
    raw = {
        "public_tests": {"input": ["1 2"], "output": ["3"]},
        "private_tests": {"input": ["1 2", "4 5", "4 5"], "output": ["3", "9", "9"]},
    }
    tests = read_tests(raw, place="row 1")
    assert (list(tests.public), list(tests.cases)) == (ADD[:1], ADD[1:])


@pytest.mark.parametrize("shown", ["1 2\n", "\n1 2  ", "1 2\r\n"])
def test_a_shown_test_is_known_whatever_space_is_around_it(shown: str) -> None:
    raw = {
        "public_tests": [{"input": shown, "output": "3\n"}],
        "tests": [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}],
    }
    tests = read_tests(raw, place="row 1")
    assert (len(tests.public), list(tests.cases)) == (1, ADD[1:])


@pytest.mark.parametrize(
    ("outputs", "more"),
    [
        (["3", "3\n"], {}),
        (["a b", "b a"], {"checker_type": "unordered_tokens"}),
        (["1", "2"], {"checker_code": "def check(given, expected, actual): return True"}),
        (["0.5", "0.50000000001"], {}),
    ],
)
def test_expectations_that_the_checker_accepts_for_one_another_are_one_case(outputs: list[str], more: Any) -> None:
    tests = read_tests({"inputs": ["x", "x"], "outputs": outputs, **more}, place="row 1")
    assert tests.cases == (Case(given="x", expected=outputs[0]),)


CHECK = "def check(given, expected, actual): return True"


@pytest.mark.parametrize(
    ("more", "checker"),
    [
        ({}, "standard"),
        ({"checker_type": "auto"}, "standard"),
        ({"checker_type": "auto", "checker_code": CHECK}, "custom"),
        ({"special_judge": True, "checker": CHECK}, "custom"),
        ({"special_judge": False}, "standard"),
        ({"checker_type": "unordered_tokens"}, "unordered_tokens"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_checker_is_read_beside_the_cases_or_around_them(more: Any, checker: str, is_nested: bool) -> None:
    cases = {"inputs": ["1 2"], "outputs": ["3"]}
    raw = {"tests": {**cases, **more}} if is_nested else {"tests": cases, **more}
    tests = read_tests(raw, place="row 1")
    assert (tests.checker, tests.checker_code) == (checker, CHECK if checker == "custom" else "")


def test_the_name_at_the_tests_wins_over_the_one_around_them() -> None:
    cases = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}
    assert read_tests({"tests": cases, "fn_name": "g"}, place="row 1").fn_name == "f"
    case = {"input": [1, 2], "output": 3}
    tests = read_tests({"tests": [case], "fn_name": "g", "metadata": {"func_name": "h"}}, place="row 1")
    assert (tests.fn_name, tests.cases) == ("g", (Case(given=[1, 2], expected=3),))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "row 1: holds no case"),
        ({"tests": []}, "row 1: case 1 has no input"),
        (
            {"public_tests": [{"input": "1", "output": "1"}], "private_tests": [{"input": "1", "output": "1"}]},
            "no case that is not public",
        ),
        ({"inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
        ([{"input": "1"}], "case 1 has no output"),
        ({"inputs": ["1", "2"], "outputs": ["1", None]}, "row 1: a case has input '2' and output 'None': write a text"),
        ({"inputs": [None, "2"], "outputs": ["1", "2"]}, "row 1: a case has input 'None' and output '1': write a text"),
        (["1"], "case 1 is str"),
        (
            [{"input": "1", "output": "2"}, {"input": "1", "output": "3"}],
            "two cases with the same input '1' expect '2' and '3'",
        ),
        ("not json", "neither JSON nor packed tests"),
        (base64.b64encode(zlib.compress(pickle.dumps(print))).decode(), "only text is read"),
        ({"inputs": ["1"], "outputs": ["1"], "checker_type": "testlib"}, "checker 'testlib' is not known"),
        ({"inputs": ["1"], "outputs": ["1"], "checker_type": "custom"}, "has no checker_code"),
        (
            {"inputs": ["1"], "outputs": ["1"], "checker_type": "standard", "checker_code": "x"},
            "'standard' comes with checker_code",
        ),
        ({"inputs": ["1", "2"], "outputs": ["", " \n"]}, "row 1: every hidden case expects nothing"),
        ({"inputs": [[1]], "outputs": [None], "fn_name": "f"}, "row 1: every hidden case expects nothing"),
        ("[" * 100_000, "row 1: tests are nested too deeply"),
        ({"tests": "[" * 100_000}, "row 1: tests are nested too deeply"),
        ("{}", "row 1: case 1 has no input"),
        (None, "row 1: tests are a list or an object"),
        ({"private_tests": {"input": [], "output": []}}, "row 1: holds no case"),
        ({"inputs": [[1], [1]], "outputs": ["1", 1], "fn_name": "f"}, r"two cases with the same input '\[1\]'"),
        ({"inputs": ["nums = [1], k = 2"], "outputs": ["3"]}, r"named arguments like 'nums = \[1\], k = 2'.*fn_name"),
        ({"inputs": ["k = 2\nnums = [1]", "k = 1"], "outputs": ["3", "4"]}, "row 1: every input is a list of named"),
        ({"inputs": [{"nums": [1], "k": 2}], "outputs": ["3"]}, "is an object, and no function takes it.*fn_name"),
        ({"inputs": ["nums = [1, k = 2"], "outputs": ["3"], "fn_name": "f"}, "begins like named arguments"),
        ({"inputs": ["root = Tree([1])"], "outputs": ["3"], "fn_name": "f"}, "begins like named arguments"),
        ({"inputs": ["x = {1: 2}"], "outputs": ["2"], "fn_name": "f"}, "the keys of an object are texts"),
        ({"inputs": ["x = [{None: 2}]"], "outputs": ["2"], "fn_name": "f"}, "the keys of an object are texts"),
        ({"inputs": ["x = 1, x = 2"], "outputs": ["2"], "fn_name": "f"}, "begins like named arguments"),
    ],
)
def test_what_cannot_judge_is_refused_with_its_place(raw: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(raw, place="row 1")


def test_a_batch_of_one_line_tests_is_taken_apart() -> None:
    tests = CodeTests(cases=(Case(given="2\n1 2\n4 5\n", expected="3\n9\n"), Case(given="1 2\n", expected="3\n")))
    parts = expand_batched(tests, "The first line holds the number of test cases.").cases
    assert [(c.given, c.expected) for c in parts] == [("1\n1 2\n", "3\n"), ("1\n4 5\n", "9\n"), ("1 2\n", "3\n")]
    assert expand_batched(tests, "Two numbers.") == tests


BATCHES = "The first line holds the number of test cases."


def pairs(cases: Sequence[Case]) -> list[tuple[str, str]]:
    return [(case.given, case.expected) for case in cases]


def test_a_part_of_a_batch_that_is_shown_does_not_pay() -> None:
    public = (Case(given="2\n1 2\n4 5\n", expected="3\n9\n"),)
    tests = CodeTests(public=public, cases=(Case(given="3\n1 2\n4 5\n7 8\n", expected="3\n9\n15\n"),) * 2)
    parts = expand_batched(tests, BATCHES)
    assert pairs(parts.cases) == [("1\n7 8\n", "15\n")]
    assert pairs(parts.public) == [("1\n1 2\n", "3\n"), ("1\n4 5\n", "9\n")]
    with pytest.raises(ValueError, match="task 7: holds no case that is not public"):
        expand_batched(CodeTests(public=public, cases=public), BATCHES, place="task 7")


def test_a_batch_whose_parts_depend_on_one_another_stays_whole() -> None:
    tests = CodeTests(cases=(Case(given="2\nadd\nadd\n", expected="1\n2\n"),))
    assert expand_batched(tests, BATCHES) == tests


SAMPLE = "Add.\n\nInput\n\n1 2\n\nOutput\n3\n\nInput\n1 1\n2 2\nOutput\n  4 \n"


@pytest.mark.parametrize(
    ("given", "expected", "is_shown"),
    [
        ("1 2\n", "3", True),
        ("1 1\n2 2", "4\n", True),
        ("1 2\n1 1", "3", False),
        ("2", "3", False),
        ("1 2", "4", True),
        ("1 2", "5", False),
        ("2 2", "3", False),
    ],
)
def test_a_case_that_stands_in_the_statement_does_not_pay(given: str, expected: str, is_shown: bool) -> None:
    case, hidden = Case(given=given, expected=expected), Case(given="7 8", expected="15")
    tests = expand_batched(CodeTests(cases=(case, hidden)), SAMPLE)
    assert (case in tests.cases, case in tests.public) == (not is_shown, is_shown)
    assert hidden in tests.cases
    if is_shown:
        with pytest.raises(ValueError, match="task 7: holds no case that is not public, or stands in the statement"):
            expand_batched(CodeTests(cases=(case,)), SAMPLE, place="task 7")


def test_the_statements_batch_shows_its_parts() -> None:
    tests = CodeTests(cases=(Case(given="2\n1 2\n7 8\n", expected="3\n15\n"),))
    assert pairs(expand_batched(tests, f"{BATCHES}\n1\n1 2\n\n3\n").cases) == [("1\n7 8\n", "15\n")]


@pytest.mark.parametrize(
    ("expected", "actual", "is_right"),
    [
        ("3\n", "3", True),
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("YES", "yes", True),
        ("0.333333333", "0.3333333", True),
        ("1e3", "1000", True),
        ("3", "3.0", True),
        ("1000", "1e3", True),
        ("3", "3.0000001", False),
        ("007", "7", False),
        ("0011", "11.0", False),
        ("12345678901", "12345678902", False),
        ("12345678901", "12345678902.0", False),
        ("1000000007", "1e9", False),
        ("1000000007", "1e999999999", False),
        ("1000000007", "1e" + "9" * 40, False),
        ("1" * 5000, "1" * 5000 + ".0", True),
        ("1" * 5000, "1" * 4999 + "2.0", False),
        ("1e-7", "0", False),
        ("1e-7", "1.0000001e-7", True),
        ("0.0", "1e-10", True),
        ("1e999", "1e998", False),
        ("nan", "nan", True),
        ("1.0", "nan", False),
        ("inf", "1e999", False),
        ("abc", "ABC", False),
        ("1 2", "2 1", False),
        ("", "0", False),
        ("3", "3 3", False),
    ],
)
def test_output_is_compared_by_words_and_numbers(expected: str, actual: str, is_right: bool) -> None:
    assert is_right_output(expected, actual) is is_right


def test_words_in_any_order() -> None:
    assert has_same_tokens("a b b", "b a\nb")
    assert not has_same_tokens("a b b", "a b")


@pytest.mark.parametrize(
    ("expected", "actual", "is_right"),
    [
        (5, 5, True),
        ([5], 5, True),
        (5, [5], False),
        (0.1, 0.1 + 1e-12, True),
        (1, True, False),
        (True, 1, False),
        ([1, 2], [1, 2, 3], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        (None, None, True),
        ("5", 5, False),
        (0.0, float("nan"), False),
        (1000000007, 1e9, False),
        (3, 3.0, True),
        (3.0, 3, True),
        (3, 3.0000001, False),
        (1e-7, 0, False),
        (0.5, 10**400, False),
        (10**400, float("inf"), False),
        (Decimal(LONG), Decimal(LONG), True),
        (Decimal(LONG), Decimal(LONG[:-1] + "2"), False),
        (Decimal(LONG), int("1" * 4300), False),
        (Decimal(LONG), float("inf"), False),
        (float("inf"), Decimal(LONG), False),
        ([Decimal(LONG)], Decimal(LONG), True),
    ],
)
def test_values_are_compared_as_json(expected: Any, actual: Any, is_right: bool) -> None:
    assert is_right_value(expected, actual) is is_right
