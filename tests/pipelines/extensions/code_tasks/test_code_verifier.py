"""The verdicts of the code verifier on honest programs, right and wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pipelines.extensions.code_tasks.code_tests import Case, CodeTests, expand_batched, read_tests
from pipelines.extensions.code_tasks.code_verifier import CodeVerifier, extract_code, spread, time_limit
from serve_apps.extensions.sandbox import Sandbox, SandboxUnavailable
from serve_apps.extensions.sandbox.config import SandboxConfig

pytestmark = [pytest.mark.test, pytest.mark.needs_program("bwrap")]
ADD = CodeTests(cases=tuple(Case(given=f"{n} {n}", expected=str(2 * n)) for n in range(4)))
FUNCTION = CodeTests(
    cases=(Case(given=[[3, 1, 2]], expected=[1, 2, 3]), Case(given=[[]], expected=[])), fn_name="order"
)


@pytest.fixture(scope="module")
def judge() -> CodeVerifier:
    return CodeVerifier(sandbox=Sandbox(SandboxConfig(time_s=2)))


@pytest.mark.parametrize(
    ("code", "verdict", "passed"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", "pass", 4),
        ("import sys\ndata = sys.stdin.read().split()\nsys.stdout.write(str(int(data[0]) + int(data[1])))", "pass", 4),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", "pass", 4),
        ("import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", "pass", 4),
        ("import sys, os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())", "pass", 4),
        ("print(0)", "wrong_answer", 1),
        ("a, b = map(int, input().split())\nprint(a + b if a != 2 else 1 / 0)", "runtime_error", 3),
        ("a, b = map(int, input().split())\nwhile a == 1: pass\nprint(a + b)", "time", 3),
        ("a, b = map(int, input().split())\nx = [0] * (10 ** 9 if a == 3 else 1)\nprint(a + b)", "memory", 3),
        ("a, b = map(int, input().split())\nprint('x' * 10 ** 7 if a == 0 else a + b)", "output_limit", 3),
        ("print(input()", "compile_error", 0),
        ("", "no_code", 0),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit(3)", "runtime_error", 0),
        ("import numpy_that_is_not_there", "runtime_error", 0),
        ("print(sum(map(int, input().split())))\nexit()", "pass", 4),
        ("print(sum(map(int, input().split())))\nquit(0)", "pass", 4),
        ("print(sum(map(int, input().split())))\nexit(3)", "runtime_error", 0),
        ("print(sum(map(int, input().split())))\nexit('no')", "runtime_error", 0),
        ("(help, copyright, credits, license)\nprint(sum(map(int, input().split())))", "pass", 4),
    ],
)
def test_a_program_earns_what_it_says(judge: CodeVerifier, code: str, verdict: str, passed: int) -> None:
    judged = judge.judge(code, ADD)
    assert (judged.verdict, judged.passed, judged.total) == (verdict, passed, 4), judged
    assert judged.pass_rate == passed / 4


FAST_IO = """
import os, sys
from io import BytesIO, IOBase
class FastIO(IOBase):
    def __init__(self, file):
        self._fd, self.buffer = file.fileno(), BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
FastIO(sys.stdin)
sys.stdout = IOWrapper(sys.stdout)
print(5)
"""
"""The part of a template of competitive programmers that replaces the standard streams."""


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("import sys\nsys.__stdout__.write('5')", "pass"),
        ("import sys\nprint(int(sys.__stdin__.readline()) + 2)", "pass"),
        (
            "import sys\nprint(5 if (sys.stdin.mode, sys.stdout.mode, sys.stdin.name) == ('r', 'w', '<stdin>') else 0)",
            "pass",
        ),
        (FAST_IO, "pass"),
        ("import sys\nsys.stdout = open(1, 'w')\nprint(5)", "pass"),
        ("import sys\nsys.stdin = open(0)\nprint(int(input()) + 2)", "pass"),
        ("out = open(1, 'w')\nout.write('5')", "pass"),
        ("import io, sys\nprint(5)\nsys.stdout = io.StringIO()\nprint(6)", "pass"),
        ("import sys\nprint(5)\nsys.stdout.close()", "pass"),
        ("import sys\nprint(5, flush=True)\nsys.stdout = None", "pass"),
        ("import atexit\natexit.register(print, 5)", "pass"),
        ("import atexit, sys\natexit.register(print, 5)\nsys.exit(0)", "pass"),
        ("import atexit\natexit.register(lambda: 1 / 0)\nprint(5)", "pass"),
        ("import sys, threading, time\nthreading.Timer(0.1, print, [5]).start()\nsys.exit()", "pass"),
        ("import multiprocessing\nmultiprocessing.Process(target=print, args=(5,)).start()", "pass"),
        ("import atexit\natexit.register(print, 5)\n1 / 0", "runtime_error"),
        ("import atexit, os\natexit.register(os._exit, 3)\nprint(5, flush=True)", "runtime_error"),
        ("import sys\nprint(5)\nsys.stdout = object()", "runtime_error"),
    ],
)
def test_a_program_begins_and_ends_as_in_an_interpreter_of_its_own(
    judge: CodeVerifier, code: str, verdict: str
) -> None:
    tests = read_tests([{"input": "3", "output": "5"}], place="here")
    judged = judge.judge(code, tests)
    assert judged.verdict == verdict, judged


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("def order(xs): return sorted(xs)", "pass"),
        ("class Solution:\n    def order(self, xs: List[int]) -> List[int]:\n        return sorted(xs)", "pass"),
        ("def order(xs):\n    print('debug')\n    return tuple(sorted(xs))", "pass"),
        ("def order(xs): heapify(xs); return [heappop(xs) for _ in range(len(xs))]", "pass"),
        ("def order(xs): return xs", "wrong_answer"),
        ("def order(xs): xs.sort()", "wrong_answer"),
        ("def order(xs): pass", "wrong_answer"),
        ("def sort(xs): return sorted(xs)", "runtime_error"),
        ("def order(): return []", "runtime_error"),
    ],
)
def test_a_function_earns_what_it_returns(judge: CodeVerifier, code: str, verdict: str) -> None:
    assert judge.judge(code, FUNCTION).verdict == verdict


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("class Solution:\n    def order(self, xs: List[int]) -> None:\n        xs.sort()", "pass"),
        ("def order(xs): xs.sort(); return xs", "pass"),
        ("def order(xs): pass", "wrong_answer"),
        ("def order(xs): sorted(xs)", "wrong_answer"),
        ("def order(): pass", "runtime_error"),
    ],
)
@pytest.mark.parametrize(
    "statement",
    [
        "Sort.\n\nBegin with:\nclass Solution:\n    def order(self, xs: List[int]) -> None:\n        ",
        'Sort.\n"""\nDo not return anything, modify xs in-place instead.\n"""',
    ],
)
def test_a_function_that_returns_nothing_earns_what_it_made_of_its_argument(
    judge: CodeVerifier, statement: str, code: str, verdict: str
) -> None:
    assert judge.judge(code, expand_batched(FUNCTION, statement)).verdict == verdict


@pytest.mark.parametrize("max_cases", [1, 8, 32, 39, 40, 50])
def test_the_cases_that_are_run_are_spread_over_all_up_to_the_last(judge: CodeVerifier, max_cases: int) -> None:
    tests = CodeTests(cases=tuple(Case(given=str(n), expected="0" if n < 39 else "1") for n in range(40)))
    judged = CodeVerifier(sandbox=judge.sandbox, max_cases=max_cases).judge("print(0)", tests)
    run = min(max_cases, 40)
    assert (judged.verdict, judged.passed, judged.total, judged.num_tests) == ("wrong_answer", run - 1, run, 40)
    places = [int(case.given) for case in spread(tests.cases, max_cases)]
    gaps = {b - a for a, b in pairwise(places)}
    assert len(set(places)) == run and max(gaps, default=0) - min(gaps, default=0) <= 1


LONG = "1" * 5000


def test_integers_of_any_length_are_read_written_and_compared(judge: CodeVerifier) -> None:
    text = read_tests([{"input": LONG, "output": f"{LONG}0"}], place="here")
    assert judge.judge("print(int(input()) * 10)", text).verdict == "pass"
    assert judge.judge("print(int(input()) * 10 + 1)", text).verdict == "wrong_answer"
    call = read_tests({"inputs": [f"{LONG}\n3"], "outputs": [f"{LONG}3"], "fn_name": "f"}, place="here")
    assert judge.judge("def f(a, b): return a * 10 + b", call).verdict == "pass"
    assert judge.judge("def f(a, b): return a * 10", call).verdict == "wrong_answer"
    assert judge.judge("def f(a, b): return [a, {'b': b}]", call).verdict == "wrong_answer"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"nums": [1, 2], "k": 3}, "def f(nums, k): return sum(nums) + k"),
        ({"k": 3, "nums": [1, 2]}, "def f(nums, k=3): return sum(nums) + k"),
        ({"k": 3, "nums": [1, 2]}, "class Solution:\n    def f(self, nums, *, k): return sum(nums) + k"),
        ({"nums": [1, 2], "k": 3}, "def f(a, b): return sum(a) + b"),
        ({"nums": [1, 2], "k": 3}, "def f(settings): return sum(settings['nums']) + settings['k']"),
        ("nums = [1, 2], k = 3", "def f(a, b): return sum(a) + b"),
        ("nums = [1, 2]\nk = 3", "def f(nums, k): return sum(nums) + k"),
        ("k = 3, nums = [1, 2]", "def f(nums, k): return sum(nums) + k"),
        ("k = 3, nums = [1, 2]", "def f(nums, *, k, start=0): return sum(nums, start) + k"),
        ("k = 3, nums = [1, 2]", "class Solution:\n    def f(self, nums, k=0): return sum(nums) + k"),
        ("k = 3, nums = [1, 2]", "def f(a, b): return a + sum(b)"),
        ("k = 3, nums = [1, 2]", "def f(a, b=0): return a + sum(b)"),
        ("k = 3, nums = [1, 2]", "def f(*arguments): return arguments[0] + sum(arguments[1])"),
        ("nums = [1, 2, 3]", "def f(a): return sum(a)"),
    ],
)
def test_a_function_gets_named_arguments(judge: CodeVerifier, given: Any, code: str) -> None:
    tests = read_tests(
        {"inputs": [given], "outputs": ["6" if isinstance(given, str) else 6], "fn_name": "f"}, place="here"
    )
    assert judge.judge(code, tests).verdict == "pass"


def test_a_text_of_digits_is_a_text(judge: CodeVerifier) -> None:
    tests = read_tests({"fn_name": "add", "inputs": [["11", "1"]], "outputs": ["100"]}, place="here")
    assert judge.judge("def add(a, b): return bin(int(a, 2) + int(b, 2))[2:]", tests).verdict == "pass"
    assert judge.judge("def add(a, b): return 100", tests).verdict == "wrong_answer"


def test_a_set_is_its_sorted_list(judge: CodeVerifier) -> None:
    tests = read_tests({"fn_name": "f", "inputs": [[[10, 9, 2]]], "outputs": [[2, 9, 10]]}, place="here")
    assert judge.judge("def f(xs): return set(xs)", tests).verdict == "pass"
    assert judge.judge("def f(xs): return {*xs, 'a'}", tests).verdict == "wrong_answer"


def test_cases_side_by_side_give_the_same_verdicts(judge: CodeVerifier) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)"
    alone = judge.judge(code, ADD)
    beside = CodeVerifier(sandbox=judge.sandbox, parallel=3).judge(code, ADD)
    assert [c.verdict for c in beside.cases] == [c.verdict for c in alone.cases]
    assert alone.passed == 2


def test_a_tasks_own_checker_runs_in_a_sandbox_of_its_own(judge: CodeVerifier) -> None:
    tests = with_checker("def check(given, expected, actual):\n    return int(given) % int(actual) == 0")
    assert judge.judge("print(3)", tests).verdict == "pass"
    assert judge.judge("print(5)", tests).verdict == "wrong_answer"
    spy = with_checker("def check(given, expected, actual):\n    return bool(open('/etc/hostname').read())")
    judged = judge.judge("print(3)", spy)
    assert judged.verdict == "checker_error"
    assert "FileNotFoundError" in judged.cases[0].message


@pytest.mark.parametrize("code", ["print(0)", "print('three')", "print()", "print('9' * 5000)"])
def test_what_a_checker_cannot_read_is_wrong_where_it_can_read_what_was_expected(
    judge: CodeVerifier, code: str
) -> None:
    tests = with_checker("def check(given, expected, actual):\n    return int(given) % int(actual) == 0")
    assert judge.judge(code, tests).verdict == "wrong_answer"


@pytest.mark.parametrize("depth", [50, 300, 900, 960, 985, 990, 995, 5000])
def test_no_list_is_too_deep_for_a_checker(judge: CodeVerifier, depth: int) -> None:
    checker = "def check(given, expected, actual): return actual == expected"
    tests = CodeTests(cases=(Case(given=[1], expected=[1]),), fn_name="f", checker="custom", checker_code=checker)
    code = f"def f(n):\n    x = []\n    for _ in range({depth}): x = [x]\n    return x"
    assert judge.judge(code, tests).verdict in ("wrong_answer", "runtime_error")


@pytest.mark.parametrize(
    "checker",
    [
        "def check(given, expected, actual, problem, metadata): return problem == 'Sum' and metadata == {}",
        "def check(given, expected, actual, problem): return problem == 'Sum'",
        "def check(given, expected, actual, tolerance=0.5): return tolerance == 0.5",
        "def check(*arguments): return len(arguments) == 5",
        "def check(given, expected, actual): return 1",
        "check = lambda given, expected, actual: int(actual == '3\\n')",
    ],
)
def test_a_checker_gets_as_many_arguments_as_it_takes(judge: CodeVerifier, checker: str) -> None:
    assert judge.judge("print(3)", with_checker(checker), problem="Sum").verdict == "pass"


@pytest.mark.parametrize("checker", ["return 0", "return False", "return int(actual) > 3"])
def test_a_checker_may_say_no(judge: CodeVerifier, checker: str) -> None:
    tests = with_checker(f"def check(given, expected, actual): {checker}")
    assert judge.judge("print(3)", tests).verdict == "wrong_answer"


@pytest.mark.parametrize("checker", ["return 2", "return None", "return 'yes'"])
def test_a_checker_that_says_neither_has_failed(judge: CodeVerifier, checker: str) -> None:
    tests = with_checker(f"def check(given, expected, actual): {checker}")
    assert judge.judge("print(3)", tests).verdict == "checker_error"


@pytest.mark.parametrize("answer", ["10 ** 400", "-10 ** 400", "float('inf')", "'x'", "[[[]]] * 3", "{1: 10 ** 400}"])
def test_a_value_that_cannot_be_compared_is_wrong(judge: CodeVerifier, answer: str) -> None:
    tests = CodeTests(cases=(Case(given=[1], expected=0.5),), fn_name="f")
    assert judge.judge(f"def f(n): return {answer}", tests).verdict == "wrong_answer"


def test_names_of_builtins_keep_their_meaning(judge: CodeVerifier) -> None:
    tests = CodeTests(cases=(Case(given=[3, 4], expected=[4, 3, 4.0]),), fn_name="f")
    assert judge.judge("def f(a, b): return [pow(a, b, 7), abs(-a), sqrt(16)]", tests).verdict == "pass"


def test_recursion_by_way_of_c_may_be_20_000_calls_deep(judge: CodeVerifier) -> None:
    code = "@lru_cache(None)\ndef g(n): return n and g(n - 1) + 1\ndef f(n): return g(n)"
    assert judge.judge(code, CodeTests(cases=(Case(given=[20_000], expected=20_000),), fn_name="f")).verdict == "pass"


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b): return a + b",
        "def add(a, b, c=0): return a + b + c",
        "class Solution:\n    def add(self, a, b): return a + b",
        "def add(numbers): return sum(numbers)",
        "def add(numbers, start=0): return sum(numbers, start)",
    ],
)
def test_a_single_list_is_spread_where_the_function_takes_several(judge: CodeVerifier, code: str) -> None:
    tests = read_tests({"input": "[1, 2]", "output": "3", "fn_name": "add"}, place="here")
    assert judge.judge(code, tests).verdict == "pass"


def test_a_verdict_holds_the_beginning_of_the_output(judge: CodeVerifier) -> None:
    assert judge.judge("print('x' * 1000)", ADD).cases[0].output == "x" * 200
    (first, _) = judge.judge("def order(xs): return xs + ['y']", FUNCTION).cases
    assert first.output == "[3, 1, 2, 'y']"
    assert judge.judge("", ADD).cases[0].output == ""


@pytest.mark.nightly
def test_after_two_cases_that_took_too_long_no_more_is_run(judge: CodeVerifier) -> None:
    tests = CodeTests(cases=tuple(Case(given=str(n), expected=str(n)) for n in range(8)))
    code = "n = int(input())\nwhile n in (1, 3): pass\nprint(n)"
    for parallel in (1, 3):
        judged = CodeVerifier(sandbox=judge.sandbox, parallel=parallel).judge(code, tests, time_s=1.5)
        assert [c.verdict for c in judged.cases] == ["pass", "time", "pass", *["time"] * 5]
        assert judged.cases[7].seconds == 0


@pytest.mark.nightly
def test_a_submission_has_a_limit_in_all(judge: CodeVerifier) -> None:
    verifier = CodeVerifier(sandbox=judge.sandbox, total_s=2.5)
    judged = verifier.judge("import time\ntime.sleep(1.5)\nprint(sum(map(int, input().split())))", ADD)
    assert [c.verdict for c in judged.cases] == ["pass", "pass", "time", "time"]


def test_a_statement_may_not_ask_for_more_than_the_settings_allow() -> None:
    judge = CodeVerifier(sandbox=Sandbox(SandboxConfig(max_time_s=0.5)))
    judged = judge.judge("import time\ntime.sleep(30)\nprint(0)", ADD, time_s=1000)
    assert judged.cases[0].verdict == "time"
    assert judged.cases[0].seconds < 10


def test_tests_without_a_case_are_refused(judge: CodeVerifier) -> None:
    with pytest.raises(ValueError, match="hold no case"):
        judge.judge("print(1)", CodeTests(cases=()))


def test_where_no_wall_holds_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    judge = CodeVerifier(sandbox=Sandbox(SandboxConfig(wall="bubblewrap")))
    judged = judge.judge("print(0)", ADD)
    assert (judged.verdict, judged.passed) == ("sandbox_error", 0)
    assert "bwrap is not installed" in judged.cases[0].message
    with pytest.raises(SandboxUnavailable, match=r"install bubblewrap .* or set sandbox\.wall: none"):
        _ = judge.sandbox.wall


def test_no_wall_only_where_it_is_asked_for() -> None:
    sandbox = Sandbox(SandboxConfig(wall="none"))
    assert "NO WALL" in sandbox.describe()
    assert CodeVerifier(sandbox=sandbox).judge("print(sum(map(int, input().split())))", ADD).verdict == "pass"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<code>print(1)</code>", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nand\n```\nnot python at all\n```", "print(1)"),
        ("<code>\n```py\nprint(1)\n```\n</code>", "print(1)"),
        ("print(1)", "print(1)"),
        ("\ufeffprint(1)", "print(1)"),
        ("```python\n\ufeffprint(1)\n```\nor\n```\nno python )\n```", "print(1)"),
        ("<code>1</code> or <CODE>print('<code>')</code>, not <code>3", "print('<code>')"),
        ("```\nstill not python )\n```", "still not python )"),
        ("<think>```python\nprint(2)\n```</think>print(1)", "print(1)"),
        ("<think><code>print(2)</code>", ""),
        ("<code>a</code>" * 9 + "<code>b</code><code>", "b"),
        ("```python3\nprint(1)\n```", "print(1)"),
        ("``` Python 3\nprint(1)\n```", "print(1)"),
        ("```{.python}\nprint(1)\n```", "print(1)"),
        ("```python\r\nprint(1)\n```", "print(1)"),
        ("For\n```text\n3\n```\nit is\n```python\nprint(1)\n```\nThat is all.", "print(1)"),
        ("```json\n[3]\n```\n\n```\nprint(1)\n```", "print(1)"),
        ("```python\nprint(1)\n```\nIts output:\n```\n1\n```", "print(1)"),
        ("```python\nprint(1)\n```\nIts output:\n```text\n1\n```", "print(1)"),
    ],
)
def test_the_code_of_a_completion_is_found(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("statement", "seconds"),
    [
        ("Time limit: 2 seconds", 2.0),
        ("time limit per test: 1.5 s.", 1.5),
        ("Time Limit 500ms", 0.5),
        ("no limit", None),
    ],
)
def test_a_statements_time_limit_is_read(statement: str, seconds: float | None) -> None:
    assert time_limit(statement) == seconds


def with_checker(code: str) -> CodeTests:
    return CodeTests(cases=(Case(given="12", expected="2"),), checker="custom", checker_code=code)
