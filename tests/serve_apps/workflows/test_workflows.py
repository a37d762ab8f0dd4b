"""Workflows, played by scripted agents: who speaks when, what reaches whose prompt, when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_apps.authoring.agent import Agent, Tool, ToolError
from serve_apps.authoring.workflow import Outcome, Workflow, together
from serve_apps.workflows.solver_verifier import SolverVerifier
from stores.types import EpisodeStatus, Task
from tests.serve_apps.plays import agents_of, play

pytestmark = pytest.mark.fast


SUM = Task(task_id="t", prompt="2+3", answers=("5",))


APPROVES = "<CRITIQUE>fine</CRITIQUE><VERDICT>approve</VERDICT>"
REJECTS = "<CRITIQUE>add them</CRITIQUE><VERDICT>reject</VERDICT>"


@pytest.mark.parametrize(
    ("verdicts", "spoke", "reason"),
    [
        ([APPROVES], ["solver", "verifier"], "approved"),
        ([REJECTS, APPROVES], ["solver", "verifier"] * 2, "approved"),
        ([REJECTS] * 2, [*["solver", "verifier"] * 2, "solver"], "last_round"),
        (["no verdict"] * 2, [*["solver", "verifier"] * 2, "solver"], "last_round"),
    ],
)
def test_solver_and_verifier_go_on_until_approved(verdicts: list[str], spoke: list[str], reason: str) -> None:
    trace = play(
        SolverVerifier(max_rounds=3),
        SUM,
        lambda agent, n, _: rf"steps \boxed{{{n}}}" if agent == "solver" else verdicts[n],
    )
    assert (agents_of(trace), trace.stop_reason) == (spoke, reason)
    assert trace.answer == str(spoke.count("solver") - 1)
    solvers = [t for t in trace.turns if t.agent == "solver"]
    if len(solvers) > 1:
        feedback = "add them" if REJECTS in verdicts else "reject"
        assert f"Earlier answer: 0\nWhat the verifier said of it: {feedback}" in solvers[1].prompt_text
        assert set(solvers[1].parents) == ({0, 1} if REJECTS in verdicts else {0})
    assert [t.is_format_ok for t in trace.turns if t.agent == "verifier"] == ["VERDICT" in v for v in verdicts]


def test_an_agent_that_fails_ends_the_calls_side_by_side() -> None:
    ended: list[bool] = []

    class Team(Workflow):
        agent = Agent(prompt="{question}")

        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            endless = asyncio.ensure_future(asyncio.Event().wait())
            try:
                await together(endless, agents.agent(wrong="input"))
            finally:
                ended.append(endless.cancelled())
            raise AssertionError

    trace = play(Team(), SUM, lambda *_: "")
    assert (trace.status, ended) == (EpisodeStatus.AGENT_ERROR, [True])


async def _add(a: int, terms: list[int]) -> int:
    return a + sum(terms)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"a": "two", "terms": []}, "a: Input should be a valid integer"),
        ({"a": 1}, "terms: Missing required argument"),
        ({"a": 1, "terms": [1, "x"]}, r"terms\.1: Input should be a valid integer"),
        ({"a": 1, "terms": [], "b": 2}, "b: Unexpected keyword argument"),
    ],
)
def test_a_tools_arguments_are_checked_by_its_signature(arguments: dict[str, Any], said: str) -> None:
    assert asyncio.run(Tool(_add)(a=1, terms=[2, 3])) == 6
    with pytest.raises(ToolError, match=said):
        asyncio.run(Tool(_add)(**arguments))
