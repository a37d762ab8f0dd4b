"""Code is planned, written, judged and mended; what prompts show never pays."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipelines.extensions.code_tasks.code_tests import read_tests
from pipelines.extensions.code_tasks.code_verifier import Judgement
from pipelines.extensions.code_tasks.reflective_code import ReflectiveCode
from serve_apps.authoring.fair_lanes import CALLER
from stores.types import EpisodeStatus, Task
from tests.serve_apps.plays import agents_of, play

pytestmark = pytest.mark.fast


TESTS = {
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": ["4 5", "70 8"], "output": ["9", "78"]},
}


@pytest.mark.needs_program("bwrap")
def test_code_is_mended_until_it_passes_and_no_prompt_shows_a_test_that_pays() -> None:
    programs = ["print(9)", "print(sum(map(int, input().split())))"]

    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "planner": "<pseudocode>add</pseudocode>",
            "coder": f"<code>{programs[min(n, 1)]}</code>",
            "reflector": "<reflection>read the input</reflection>",
        }[agent]

    task = Task(task_id="t", prompt="Add two numbers.", answers=(), metadata={"tests": json.dumps(TESTS)})
    trace = play(ReflectiveCode(), task, say)
    round_ = ["planner", "coder", "verify"]
    assert agents_of(trace) == [*round_, "reflector", *round_]
    assert [c.response["pass_rate"] for c in trace.tool_calls] == [0.5, 1.0]
    assert (trace.stop_reason, trace.answer) == ("passed", programs[1])
    prompts = "\n".join(t.prompt_text for t in trace.turns)
    assert "1 2 -> 3" in prompts
    assert "70" not in prompts and "4 5" not in prompts
    assert "70" not in json.dumps(trace.tool_calls[0].request)
    again = next(t for t in trace.turns if t.round_index == 1)
    assert "Earlier program: print(9)\nIts result: 1 of 2 tests passed; wrong answer" in again.prompt_text
    assert "Advice: read the input" in again.prompt_text
    reflector = next(t for t in trace.turns if t.agent == "reflector")
    assert "For 1 2 it should give 3, it gave: 9" in reflector.prompt_text
    assert "Read standard input" in reflector.prompt_text
    assert {agents_of(trace)[i] for i in reflector.parents} == {"coder", "verify"}

    goes_on = play(ReflectiveCode(stop_on_all_passed=False), task, say)
    assert agents_of(goes_on) == [*round_, "reflector", *round_, "reflector", *round_]
    assert (goes_on.stop_reason, goes_on.answer) == ("passed", programs[1])


@pytest.mark.needs_program("bwrap")
def test_fewer_tests_may_run_than_are_shown() -> None:
    tests = {
        "public_tests": {"input": ["1", "2", "3"], "output": ["1", "2", "3"]},
        "private_tests": {"input": ["5", "6"], "output": ["5", "6"]},
    }
    task = Task(task_id="t", prompt="Say it again.", answers=(), metadata={"tests": json.dumps(tests)})
    says = {"planner": "<pseudocode>say</pseudocode>", "coder": "<code>print(min(int(input()), 4))</code>"}
    workflow = ReflectiveCode(max_cases=2, max_examples=3, max_rounds=1)
    trace = play(workflow, task, lambda agent, n, _: says.get(agent, "<reflection>no</reflection>"))
    assert (trace.status, trace.error) == (EpisodeStatus.OK, "")
    assert [c.response["pass_rate"] for c in trace.tool_calls] == [0.0]


def test_code_without_hidden_tests_is_an_error_of_the_task() -> None:
    task = Task(task_id="t7", prompt="Add.", answers=(), metadata={"tests": []})
    trace = play(ReflectiveCode(), task, lambda *_: "")
    assert trace.status is EpisodeStatus.AGENT_ERROR
    assert "task t7: holds no case" in trace.error


@dataclass
class SlowJudge:
    """Passes every program, in the order in which they come, and none before it is let go."""

    may_go: threading.Event = field(default_factory=threading.Event)
    judged: list[str] = field(default_factory=list)

    def judge(self, code: str, *_: Any, **__: Any) -> Judgement:
        assert self.may_go.wait(10)
        self.judged.append(code)
        return Judgement(verdict="pass", passed=1, total=1, num_tests=1, cases=(), seconds=0.0)


def test_a_caller_with_many_programs_does_not_hold_the_judges_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    workflow, judge = ReflectiveCode(), SlowJudge()
    monkeypatch.setattr(workflow, "_judge", judge)
    tests = read_tests(TESTS, place="here")

    async def ask() -> None:
        asked = []
        for caller, codes in (("greedy", ["g0", "g1", "g2", "g3", "g4"]), ("honest", ["h0"])):
            CALLER.set(caller)
            verify = workflow.tools["verify"].function
            asked += [asyncio.create_task(verify(code=c, tests=tests, num_shown=0, statement="")) for c in codes]
        await asyncio.sleep(0)  # each has come to the lanes
        judge.may_go.set()
        await asyncio.gather(*asked)

    asyncio.run(ask())
    assert judge.judged.index("h0") <= 2, judge.judged
