"""waiting_team: the math chain with a tool between its turns that takes half a second and does nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_apps.authoring.agent import Tool
from serve_apps.authoring.workflow import Outcome
from serve_apps.workflows.math_chain import MathChain
from stores.types import Task

SECONDS = 0.5


async def look_up(question: str) -> str:
    """Takes its time."""
    await asyncio.sleep(SECONDS)
    return question


class WaitingTeam(MathChain):
    """Waits three times per episode for a tool."""

    lookup = Tool(look_up)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the answer of the finalizer."""
        draft = await agents.solver(question=task.prompt)
        await tools.lookup(question=task.prompt)
        given = {"question": task.prompt, "solution": draft["solution"], "answer": draft["answer"]}
        check = await agents.verifier(**given)
        await tools.lookup(question=task.prompt)
        refined = await agents.refiner(**given, status=check["status"], feedback=check["feedback"])
        await tools.lookup(question=task.prompt)
        final = await agents.finalizer(
            question=task.prompt, solution=refined["refined_solution"], answer=refined["answer"]
        )
        return Outcome(answer=final["final_answer"])
