"""reflective_code: plan, code, run the tests, reflect, up to three rounds (UnityMAS-O, arXiv 2605.26646)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

from pipelines.extensions.code_tasks.code_test_formats import is_plain
from pipelines.extensions.code_tasks.code_tests import CodeTests, expand_batched, foreign_modules, read_tests
from pipelines.extensions.code_tasks.code_verifier import NOT_JUDGED, CodeVerifier, Judgement, extract_code, time_limit
from serve_apps.authoring.agent import Agent, Tool, ToolFault, TracedText
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.fair_lanes import FairLanes
from serve_apps.authoring.prompt_budget import shorten
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.extensions.sandbox import Sandbox
from serve_apps.extensions.sandbox.config import SandboxConfig
from stores.settings import Count
from stores.types import Task

MAX_HISTORY_CHARS, MAX_EXAMPLE_CHARS = 12_000, 3_000
MAX_REQUEST_CHARS = 200_000
"""Characters of the tests that a caller of the gateway gives."""
VERIFY_TIMEOUT_S = 1_800.0
"""Seconds, the wait for a free lane included; the judge itself bounds the time of a program."""


class ReflectiveCode(Workflow):
    """Runs planner -> coder -> verify (tool) -> reflector. Prompts show public tests; hidden ones pay.

    The tests are in `task.metadata["tests"]`, in any format of `code_test_formats.py`.
    """

    planner = Agent(
        prompt=(
            "Plan the program. Reply with <pseudocode>plan</pseudocode> only.\n"
            "{history}{how}\nExamples:\n{examples}\nTask: {question}"
        ),
        contract=Tags("pseudocode"),
        cut=("history", "examples"),
    )
    coder = Agent(
        prompt=(
            "Write the program in Python. Reply with <code>program</code> only.\n"
            "{history}{how}\nPlan: {plan}\nExamples:\n{examples}\nTask: {question}"
        ),
        contract=Tags("code"),
        cut=("history", "plan", "examples"),
    )
    reflector = Agent(
        prompt=(
            "Say what is wrong and how to mend it. Reply with <reflection>advice</reflection> only.\n"
            "{how}\nProgram: {code}\nResult: {result}\nTask: {question}"
        ),
        contract=Tags("reflection"),
        cut=("result", "code"),
    )

    def __init__(
        self,
        max_rounds: Count = 3,
        max_examples: int = 3,
        max_cases: Count = 8,
        stop_on_all_passed: bool = True,
        sandbox: dict[str, Any] | None = None,
    ) -> None:
        """Sets the workflow up.

        Args:
            max_rounds: programs at most.
            max_examples: public tests that prompts show.
            max_cases: hidden tests that are run per program, spread over all that the task has.
            stop_on_all_passed: whether a program that passes is the last; else every episode has all rounds.
            sandbox: settings of the sandbox (`SandboxConfig`).
        """
        self.max_rounds, self.max_examples = max_rounds, max_examples
        self.stop_on_all_passed = stop_on_all_passed
        self._judge = CodeVerifier(sandbox=Sandbox(SandboxConfig(**(sandbox or {}))), max_cases=max_cases)
        self._lanes = FairLanes("judge")
        self.tools = {"verify": Tool(self._verify, timeout_s=VERIFY_TIMEOUT_S, unrecorded=("tests",))}

    def preflight(self) -> list[str]:
        """Returns the layers of the sandbox on this machine."""
        return [self._judge.sandbox.describe()]

    def check_task(self, task: Task, place: str) -> None:
        """Raises ValueError for tests that cannot judge, and for a task whose programs need what the sandbox lacks."""
        tests = _tests(task, place)
        for what, text in (("the statement", task.prompt), ("the checker", tests.checker_code)):
            if modules := foreign_modules(text):
                raise ValueError(
                    f"{place}: {what} imports {', '.join(modules)}, and the sandbox has the standard library alone: write it "
                    "without, or leave the task out"
                )

    def check_request(self, task: Task) -> None:
        """Refuses also what a caller could hold the gateway up with: tests as packed text, very long ones, a checker of its own."""
        tests = task.metadata.get("tests")
        if not is_plain(tests):
            raise ValueError(
                f"metadata.tests: {str(tests)[:60]!r} is a text: give the tests as JSON values, here and within"
            )
        if len(json.dumps(tests)) > MAX_REQUEST_CHARS:
            raise ValueError(f"metadata.tests: give tests of at most {MAX_REQUEST_CHARS:,} characters as JSON")
        super().check_request(task)
        if _tests(task, "metadata").checker_code:
            raise ValueError(
                "metadata.tests: a checker is code that judges, and is taken from task files only: leave it out"
            )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the last program."""
        tests = _tests(task, f"task {task.task_id}")
        shown = tests.public[: self.max_examples]
        about = {
            "question": task.prompt,
            "how": f"Define the function {tests.fn_name}."
            if tests.fn_name
            else "Read standard input, print the answer.",
        }
        examples = shorten("\n".join(f"{case.given} -> {case.expected}" for case in shown), MAX_EXAMPLE_CHARS)
        history, program, checked = TracedText(""), TracedText(""), {"pass_rate": 0.0}
        for round_index in range(self.max_rounds):
            earlier = shorten(history, MAX_HISTORY_CHARS)
            plan = await agents.planner(**about, history=earlier, examples=examples)
            draft = await agents.coder(
                **about, history=earlier, plan=plan["pseudocode"] or plan.text, examples=examples
            )
            program = TracedText.by(extract_code(draft["code"] or draft.text), draft.turn_index)
            checked = await tools.verify(code=program, tests=tests, num_shown=len(shown), statement=task.prompt)
            is_done = self.stop_on_all_passed and checked["pass_rate"] == 1.0
            if is_done or round_index == self.max_rounds - 1:
                break
            advice = await agents.reflector(
                question=task.prompt, how=about["how"], code=program, result=checked["result"]
            )
            history = TracedText.joined(
                history,
                *("Earlier program: ", program, "\nIts result: ", checked["result"]),
                *("\nAdvice: ", advice["reflection"] or advice.text, "\n"),
            )
        stop_reason = "passed" if checked["pass_rate"] == 1.0 else "last_round"
        return Outcome(answer=program, stop_reason=stop_reason, metadata={"pass_rate": checked["pass_rate"]})

    async def _verify(self, code: str, tests: CodeTests, num_shown: int, statement: str) -> dict[str, Any]:
        """Returns the share of hidden tests that pass, and a text: how many passed, and the output of the first
        shown test that failed."""
        judged = await self._judged(code, tests, statement)
        which = f" ({judged.total} of {judged.num_tests} were run)" if judged.total < judged.num_tests else ""
        result = f"{judged.passed} of {judged.total} tests passed{which}; {judged.verdict.replace('_', ' ')}"
        if judged.verdict != "pass" and num_shown:
            shown = replace(tests, cases=tests.public[: min(num_shown, self._judge.max_cases)])
            shown_judgement = await self._judged(code, shown, statement)
            for case, case_verdict in zip(shown.cases, shown_judgement.cases, strict=True):
                if case_verdict.verdict != "pass":
                    output = (
                        case_verdict.output or case_verdict.message[-200:] or case_verdict.verdict.replace("_", " ")
                    )
                    result += f"\nFor {case.given} it should give {case.expected}, it gave: {output}"
                    break
        return {
            "pass_rate": judged.pass_rate,
            "verdict": judged.verdict,
            "passed": judged.passed,
            "total": judged.total,
            "num_tests": judged.num_tests,
            "result": result,
        }

    async def _judged(self, code: str, tests: CodeTests, statement: str) -> Judgement:
        """Raises ToolFault where the sandbox fails, and what the task's own checker raised where that fails.

        What a program prints can make a checker fail: it is the policy's doing, unless the checker fails on all programs.
        """
        ask = partial(self._judge.judge, code, tests, time_s=time_limit(statement), problem=statement)
        judged = await asyncio.wrap_future(self._lanes.submit(ask))
        if judged.verdict in NOT_JUDGED:
            said = f"{judged.verdict}: {next(c.message for c in judged.cases if c.verdict in NOT_JUDGED)}"
            raise ToolFault(said) if judged.verdict == "sandbox_error" else RuntimeError(said)
        return judged


def _tests(task: Task, place: str) -> CodeTests:
    return expand_batched(read_tests(task.metadata.get("tests"), place=place), task.prompt, place=place)
