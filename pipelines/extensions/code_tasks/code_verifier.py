"""code_verifier: a submission and hidden tests -> a verdict per case. It never enters the sandbox.

    judge(code, tests) ── inputs only ──> Sandbox ── outputs ──> checkers ──> Judgement(verdict, passed / total)

Only the output of a program decides: its exit code, what it prints about itself and what it does to the process that ran it
count for nothing. Where no sandbox can be started there is no verdict at all: the episode is missing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipelines.extensions.code_tasks.checkers import OUTPUT_CHECKERS, is_right_value
from pipelines.extensions.code_tasks.code_tests import Case, CodeTests
from serve_apps.authoring.thinking import after_thinking
from serve_apps.extensions.sandbox import MAX_TIMEOUTS, Call, CaseRun, Program, Sandbox, SandboxUnavailable
from stores.syntax_trees import parse_python

Verdict = Literal[
    "pass",
    "wrong_answer",
    "time",
    "memory",
    "output_limit",
    "runtime_error",
    "compile_error",
    "no_code",
    "checker_error",
    "sandbox_error",
]
_OF_STATUS: dict[str, Verdict] = {
    "time": "time",
    "memory": "memory",
    "output": "output_limit",
    "error": "runtime_error",
    "lost": "runtime_error",
    "compile": "compile_error",
}
MAX_OUTPUT_CHARS = 200
MAX_DEPTH = 100
NOT_JUDGED = ("checker_error", "sandbox_error")
"""Verdicts that are not about the program. What the program prints may have made a checker fail, so that such an episode counts
as the policy's failure unless its task's checker fails whatever the program prints; one without a sandbox is missing."""

_CODE_TAG = re.compile(r"<(/?)code>", re.IGNORECASE)
_AROUND = "\n\ufeff"
"""What stands around a program and is none of it: Python refuses a byte order mark."""
_FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"\W*py(thon)?[\d.]*\b", re.IGNORECASE)
"""How the words behind an opening fence begin that name Python: `python3`, `{.python}`."""
_TIME_LIMIT = re.compile(
    r"time\s*limit(?:\s*per\s*test)?\W{0,12}(\d+(?:\.\d+)?)\s*(ms|millisecond|s\b|sec|second)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """Holds the verdict on one case."""

    verdict: Verdict
    seconds: float
    message: str = ""
    """The end of the program's standard error; never the expected output."""
    output: str = ""
    """The beginning of the program's output, or of its function's value; never the expected output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Holds the verdict on a submission, in JSON values throughout."""

    verdict: Verdict
    """`pass` if all cases that were run passed, else the verdict of the first that did not."""
    passed: int
    total: int
    """Cases that were run."""
    num_tests: int
    """Cases that the task has."""
    cases: tuple[CaseVerdict, ...]
    seconds: float

    @property
    def pass_rate(self) -> float:
        """The share of the cases that passed; 0 where there is no code."""
        return self.passed / self.total if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data for the trace."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerifier:
    """Judges submissions. Safe to use from several threads."""

    sandbox: Sandbox
    max_cases: int = 32
    """Only so many cases are run, so that one task cannot hold up all others: see `spread`."""
    parallel: int = 1
    """The number of sandboxes side by side for one submission."""
    total_s: float = 60.0
    """Seconds for all cases of a submission. The verdict on cases that have not been run by then is `time`."""

    def judge(self, code: str, tests: CodeTests, *, time_s: float | None = None, problem: str = "") -> Judgement:
        """Runs `code` on every case; after MAX_TIMEOUTS that took too long the rest are `time`, too.

        Args:
            code: source; without any code no case passes.
            tests: the hidden cases.
            time_s: seconds per case that the task allows, at most the settings' `max_time_s`; default as they say.
            problem: the statement, for a task's own checker.

        Raises ValueError for tests without a case, which any program would pass.
        """
        if not tests.cases:
            raise ValueError("these tests hold no case, and any program would pass them: give at least one")
        began = time.monotonic()
        time_s = min(time_s, self.sandbox.config.max_time_s) if time_s else None
        cases = spread(tests.cases, self.max_cases)
        if not code.strip():
            verdicts = [CaseVerdict(verdict="no_code", seconds=0.0)] * len(cases)
        else:
            verdicts = self._verdicts(
                Program(code=code, fn_name=tests.fn_name, is_in_place=tests.is_in_place), tests, cases, time_s, problem
            )
        passed = sum(v.verdict == "pass" for v in verdicts)
        unjudged = next((v.verdict for v in verdicts if v.verdict in NOT_JUDGED), None)
        first: Verdict = next((v.verdict for v in verdicts if v.verdict != "pass"), "pass")
        return Judgement(
            verdict=unjudged or first,
            passed=passed,
            total=len(cases),
            num_tests=len(tests.cases),
            cases=tuple(verdicts),
            seconds=time.monotonic() - began,
        )

    def _verdicts(
        self, program: Program, tests: CodeTests, cases: Sequence[Case], time_s: float | None, problem: str
    ) -> list[CaseVerdict]:
        try:
            runs = self._runs(program, [_input(case) for case in cases], time_s)
            if tests.checker == "custom":
                return self._by_custom_checker(tests, cases, runs, problem)
        except SandboxUnavailable as fault:
            return [CaseVerdict(verdict="sandbox_error", seconds=0.0, message=str(fault))] * len(cases)
        return [
            _verdict(run, tests, is_right=run.status == "ended" and _is_right(run, case, tests))
            for run, case in zip(runs, cases, strict=True)
        ]

    def _runs(self, program: Program, inputs: Sequence[Any], time_s: float | None) -> list[CaseRun]:
        """Returns one run per input, the same for any number of sandboxes."""
        num_lanes = min(self.parallel, len(inputs))

        def run(lane: int) -> list[CaseRun]:
            return self.sandbox.run(program, inputs[lane::num_lanes], time_s=time_s, total_s=self.total_s)

        if num_lanes == 1:
            lanes = [run(0)]
        else:
            with ThreadPoolExecutor(max_workers=num_lanes) as pool:
                lanes = list(pool.map(run, range(num_lanes)))
        # Input i was the (i // num_lanes)-th of lane i % num_lanes: `inputs[lane::num_lanes]` above.
        runs = [lanes[i % num_lanes][i // num_lanes] for i in range(len(inputs))]
        # One sandbox would have stopped here: later inputs that other lanes did run are as if they had not.
        late = [i for i, run in enumerate(runs) if run.status == "time"][:MAX_TIMEOUTS]
        if len(late) == MAX_TIMEOUTS:
            runs[late[-1] + 1 :] = [CaseRun(status="time")] * (len(runs) - late[-1] - 1)
        return runs

    def _by_custom_checker(
        self, tests: CodeTests, cases: Sequence[Case], runs: Sequence[CaseRun], problem: str
    ) -> list[CaseVerdict]:
        """Judges by the task's own `check`, in a sandbox of its own, because it is not our code either.

        Where it fails it is called again with the expected output: if it can judge that, the program's output was at fault.
        """
        actual_of = {
            i: run.value if tests.fn_name else run.stdout for i, run in enumerate(runs) if run.status == "ended"
        }
        sound = {i: actual for i, actual in actual_of.items() if not _is_deep(actual)}
        answers = self._checked(tests, cases, sound, problem)
        unsure = [i for i in actual_of if i not in answers or _opinion(answers[i]) is None]
        again = self._checked(tests, cases, {i: cases[i].expected for i in unsure}, problem)
        verdicts = []
        for i, run in enumerate(runs):
            if i in again and _opinion(again[i]) is None:
                why = again[i].stderr.strip().rpartition("\n")[2] or f"it returned {again[i].value!r}, no verdict"
                message = f"the checker failed: {why}"
                verdicts.append(CaseVerdict(verdict="checker_error", seconds=run.seconds, message=message))
            else:
                verdicts.append(_verdict(run, tests, is_right=i in answers and bool(_opinion(answers[i]))))
        return verdicts

    def _checked(
        self, tests: CodeTests, cases: Sequence[Case], actual: Mapping[int, Any], problem: str
    ) -> dict[int, CaseRun]:
        """Runs `check(given, expected, actual)`, with `problem` and `metadata` if it takes them, for some of the cases."""
        checker = Program(code=tests.checker_code, fn_name="check", min_arguments=3)
        questions = [[cases[i].given, cases[i].expected, value, problem, {}] for i, value in actual.items()]
        return dict(zip(actual, self.sandbox.run(checker, questions, total_s=self.total_s), strict=True))


def spread(cases: Sequence[Case], at_most: int) -> list[Case]:
    """Returns at most so many cases, evenly spaced up to the last one: data sets put the hard ones at the end."""
    num = min(len(cases), at_most)
    return [cases[i * len(cases) // num - 1] for i in range(1, num + 1)]


def extract_code(text: str) -> str:
    """Returns the code in a completion: in the last `<code>` tags, else the last fence that is Python, else all of it.

    A fence that names Python goes before one that names nothing, and that before others, such as a `text` of the output: the number
    4 is Python, too. What a model thinks holds no code.
    """
    text = after_thinking(text)
    begin, tagged = None, None
    for tag in _CODE_TAG.finditer(text):
        if not tag[1]:
            begin = tag.end() if begin is None else begin
        elif begin is not None:
            begin, tagged = None, text[begin : tag.start()]
    text = text if tagged is None else tagged
    fences = [(name.strip(), fence.strip(_AROUND)) for name, fence in _FENCE.findall(text)]
    python = [fence for name, fence in fences if _PYTHON.match(name)]
    likeliest = python or [fence for name, fence in fences if not name] or [fence for _, fence in fences]
    for fence in reversed(likeliest):
        if _is_python(fence):
            return fence
    return likeliest[-1] if likeliest else text.strip(_AROUND)


def time_limit(statement: str) -> float | None:
    """Returns the seconds that a statement allows per test; None where it names none."""
    match = _TIME_LIMIT.search(statement)
    if match is None:
        return None
    number = float(match[1])
    return number / 1000 if match[2].lower().startswith(("ms", "milli")) else number


def _input(case: Case) -> Any:
    return Call(arguments=case.given, names=case.names) if case.names else case.given


def _is_python(text: str) -> bool:
    try:
        parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _is_deep(value: Any) -> bool:
    """Returns whether lists are nested deeper than a checker's question can be written and read."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, (list, dict))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def _opinion(answer: CaseRun) -> bool | None:
    """Returns the checker's verdict; None where it failed."""
    is_verdict = answer.status == "ended" and isinstance(answer.value, int) and answer.value in (0, 1)
    return bool(answer.value) if is_verdict else None


def _is_right(run: CaseRun, case: Case, tests: CodeTests) -> bool:
    try:
        if tests.fn_name:
            return run.has_value and is_right_value(case.expected, run.value)
        return OUTPUT_CHECKERS[tests.checker](case.expected, run.stdout)
    except (ArithmeticError, ValueError, RecursionError):
        return False  # no number, or none that can be compared


def _verdict(run: CaseRun, tests: CodeTests, *, is_right: bool) -> CaseVerdict:
    verdict: Verdict = "pass" if is_right else _OF_STATUS.get(run.status, "wrong_answer")
    return CaseVerdict(verdict=verdict, seconds=run.seconds, message=run.stderr[-1000:], output=_beginning(run, tests))


def _beginning(run: CaseRun, tests: CodeTests) -> str:
    try:
        return (repr(run.value) if tests.fn_name and run.has_value else run.stdout)[:MAX_OUTPUT_CHARS]
    except (ValueError, RecursionError):
        return ""
