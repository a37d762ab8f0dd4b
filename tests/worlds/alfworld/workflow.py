"""workflow: the planner of the household game, an actor who chooses among ALFWorld's commands, and a game of ALFWorld."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.examples.household.workflow import Household
from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.worlds.seen import Seen

ROOT = Path(__file__).parents[3]
PYTHON = ".venvs/alfworld/bin/python"
"""Interpreter with ALFWorld, from the root of the repository, see README.md."""


class Alfworld(Household):
    """The household game's control flow, in a game of ALFWorld."""

    actor = Agent(
        prompt="Goal: {goal}\nUnseen: {unseen}\nSee: {see}\nPossible: {possible}\nReply with <ACT>command</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=24,
        cut=("possible", "unseen"),
    )

    def __init__(self, python: str = PYTHON, workers: int = 1, max_steps: int = 30) -> None:
        """Args: python: interpreter with ALFWorld, from the root of the repository. workers, max_steps: those of the environment."""
        home = Environment(
            "tests.worlds.alfworld.world:Generated",
            python=str(ROOT / python),
            paths=(str(ROOT),),
            workers=workers,
            max_steps=max_steps,
            example={"seed": 0, "kind": "put"},
        )
        self.environments = {"home": home}

    def view(self, seen: Seen) -> dict[str, Any]:
        """Returns what the actor sees, beside the goal: the commands that are possible, too."""
        possible = ", ".join(seen.info["commands"])
        return {"unseen": seen.info["unseen"], "see": seen.text, "possible": possible}
