"""Code is planned, written, judged and mended; what prompts show never pays."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from pipelines.extensions.code_tasks.reflective_code import ReflectiveCode
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
