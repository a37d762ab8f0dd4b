"""A team whose first agent can work alone."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task


class Team(Workflow):
    """A solver, and a checker that reads it."""

    solver = Agent(prompt="Solve {question}", contract=Tags("ANSWER"))
    checker = Agent(prompt="Check {question}: {draft}", contract=Tags("ANSWER"))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """The checker's answer."""
        draft = await agents.solver(question=task.prompt)
        final = await agents.checker(question=task.prompt, draft=draft["answer"])
        return Outcome(answer=str(final["answer"]))
