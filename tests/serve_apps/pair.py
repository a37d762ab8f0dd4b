"""pair: a workflow of two agents with a tool between them, which the test brings."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task


class Pair(Workflow):
    """Writes, doubles with the tool, reads again."""

    writer = Agent(prompt="Compute {question}", contract=Tags("ANSWER"))
    reader = Agent(prompt="Check {answer} for {question} after {doubled}", contract=Tags("ANSWER"))

    def __init__(self, double: Tool) -> None:
        self.tools = {"double": double}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        draft = await agents.writer(question=task.prompt)
        doubled = await tools.double(number=draft["answer"])
        final = await agents.reader(answer=draft["answer"], question=task.prompt, doubled=doubled)
        return Outcome(answer=final["answer"])
