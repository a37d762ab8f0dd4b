"""workflow: two agents, each of a model group of its own, play a game against each other; the world says whose turn it is."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

PROMPT = "Heaps: {see}\nReply with <MOVE>take number from heap</MOVE> only."
CHALLENGER, RIVAL = "challenger", "rival"


class Duel(Workflow):
    """The answer is the winner's name."""

    challenger = Agent(prompt=PROMPT, contract=Tags("MOVE"), max_tokens=16)
    rival = Agent(prompt=PROMPT, contract=Tags("MOVE"), max_tokens=16)
    game = Environment(
        "pipelines.examples.nim.world:Nim",
        max_steps=24,
        example={"heaps": [1, 2, 3], "players": [CHALLENGER, RIVAL]},
    )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Plays the game that the task's metadata describes."""
        async with tools.game(**task.metadata) as game:
            while not game.seen.is_done:
                reply = await agents[game.seen.info["player"]](see=game.seen.text)
                await game.step(reply["move"])
            scores = game.seen.info["scores"]
            return Outcome(answer=max(scores, key=scores.get, default=""), stop_reason=game.stop_reason)
