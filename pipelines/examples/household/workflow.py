"""workflow: a planner says what comes next, an actor does it step by step, and both see one room."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.worlds.seen import Seen
from stores.types import Task

DONE = "done"


class Household(Workflow):
    """The planner is asked at the beginning, and each time something else is in the hand; the actor is asked for every action."""

    planner = Agent(
        prompt="Task: {task}\nHolding: {holding}\nReply with <GOAL>next goal</GOAL> only.",
        contract=Tags("GOAL"),
        max_tokens=24,
    )
    actor = Agent(
        prompt="Goal: {goal}\nAt: {at}\nUnseen: {unseen}\nSee: {see}\nReply with <ACT>action</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=24,
    )
    home = Environment(
        "pipelines.examples.household.world:House", max_steps=14, example={"seed": 0, "kind": "put"}, workers=1
    )

    def view(self, seen: Seen) -> dict[str, Any]:
        """Returns what the actor sees, beside the goal."""
        return {"at": seen.info["at"], "unseen": seen.info["unseen"], "see": seen.text}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Plays in the room that the task's metadata describes; the answer is `done` where the task is done."""
        async with tools.home(**task.metadata) as home:
            goal, holding = "", None
            while not home.seen.is_done:
                info = home.seen.info
                if info["holding"] != holding:
                    holding = info["holding"]
                    goal = (await agents.planner(task=task.prompt, holding=holding))["goal"]
                reply = await agents.actor(goal=goal, **self.view(home.seen))
                await home.step(reply["act"])
            return Outcome(answer=DONE if home.seen.info["is_won"] else "", stop_reason=home.stop_reason)
