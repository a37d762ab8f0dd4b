"""A workflow of one agent and one turn: what a trainer for single models does too."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

PROMPT = (
    "Solve the problem step by step. Reply with <SOLUTION>steps</SOLUTION><ANSWER>answer</ANSWER> only.\n"
    "Problem: {question}"
)


class SingleAgent(Workflow):
    """One call; what it says is the answer."""

    solver = Agent(prompt=PROMPT)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """The whole text."""
        reply = await agents.solver(question=task.prompt)
        return Outcome(answer=reply["text"])
