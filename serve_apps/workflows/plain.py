"""plain: a model as it is: one agent, which gets the task's text alone. `troupe serve FOLDER` serves model folders by it."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task


class Plain(Workflow):
    """Asks one agent once."""

    model = Agent(prompt="{prompt}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns what the model says."""
        reply = await agents.model(prompt=task.prompt)
        return Outcome(answer=reply.text, is_truncated=reply.is_truncated)
