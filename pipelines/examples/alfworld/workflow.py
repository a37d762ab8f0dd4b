"""workflow: the planner of the household game, an actor who chooses among ALFWorld's commands, and a game of ALFWorld."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.examples.household.workflow import DONE, Household
from serve_apps.agent import Agent
from serve_apps.contracts import Tags
from serve_apps.workflow import Outcome, Workflow
from serve_apps.worlds.environment import Environment
from stores.types import Task

ROOT = Path(__file__).parents[3]
PYTHON = ".venvs/alfworld/bin/python"
"""Interpreter with ALFWorld, from the root of the repository, see README.md."""


class Alfworld(Workflow):
    """The planner is asked at the beginning, and each time something else is in the hand; the actor is asked for every action."""

    planner = Household.planner
    actor = Agent(
        prompt="Goal: {goal}\nUnseen: {unseen}\nSee: {see}\nPossible: {possible}\nReply with <ACT>command</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=24,
        cut=("possible", "unseen"),
    )

    def __init__(self, python: str = PYTHON, workers: int = 1, max_steps: int = 30) -> None:
        """Args: python: interpreter with ALFWorld, from the root of the repository. workers, max_steps: those of the environment."""
        home = Environment(
            "pipelines.examples.alfworld.world:Generated",
            python=str(ROOT / python),
            paths=(str(ROOT),),
            workers=workers,
            max_steps=max_steps,
            example={"seed": 0, "kind": "put"},
        )
        self.environments = {"home": home}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Plays the game that the task's metadata names; the answer is `done` where the task is done."""
        async with tools.home(**task.metadata) as home:
            goal, holding = "", None
            while not home.seen.is_done:
                info = home.seen.info
                if info["holding"] != holding:
                    holding = info["holding"]
                    goal = (await agents.planner(task=task.prompt, holding=holding))["goal"]
                possible = ", ".join(info["commands"])
                reply = await agents.actor(goal=goal, unseen=info["unseen"], see=home.seen.text, possible=possible)
                await home.step(reply["act"])
            return Outcome(answer=DONE if home.seen.info["is_won"] else "", stop_reason=home.stop_reason)
