"""Workflows, played by scripted agents: who speaks when, what reaches whose prompt, when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_apps.authoring.agent import Agent, Tool, ToolError
from serve_apps.authoring.workflow import Outcome, Workflow, together
from stores.types import EpisodeStatus, Task
from tests.serve_apps.plays import play

pytestmark = pytest.mark.fast


SUM = Task(task_id="t", prompt="2+3", answers=("5",))


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
