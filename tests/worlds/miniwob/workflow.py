"""workflow: a reader sees the page and names an element, an actor sees that element and acts on it, until the page is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve_apps.authoring.agent import Agent, TracedText, origins_of
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

ROOT = Path(__file__).parents[3]
PYTHON = ".venvs/miniwob/bin/python"
"""Interpreter with MiniWoB++, from the root of the repository, see README.md."""
NO_ELEMENT = "none"
"""What the actor sees where the reader has named no element of the page."""


class Browsing(Workflow):
    """The answer is what the page has paid, 0 to 1."""

    reader = Agent(
        prompt="Page: {see}\nReply with <ELEMENT>number of the element to use next</ELEMENT> only.",
        contract=Tags("ELEMENT"),
        max_tokens=24,
    )
    actor = Agent(
        prompt="Task: {task}\nElement: {element}\nReply with <ACT>click number</ACT> or <ACT>type number words</ACT> only.",
        contract=Tags("ACT"),
        max_tokens=48,
    )

    def __init__(self, python: str = PYTHON, workers: int = 1, max_steps: int = 10) -> None:
        """Args: python: interpreter with MiniWoB++, from the root of the repository. workers: browsers. max_steps: of a page."""
        page = Environment(
            "tests.worlds.miniwob.world:Page",
            python=str(ROOT / python),
            paths=(str(ROOT),),
            workers=workers,
            is_isolated=True,
            max_steps=max_steps,
            example={"page": "click-test-2", "seed": 0},
        )
        self.environments = {"page": page}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Plays the page that the task's metadata names."""
        async with tools.page(**task.metadata) as page:
            while not page.seen.is_done:
                see = page.seen.text
                number = (await agents.reader(see=see))["element"]
                asked = TracedText.by(see.partition("\n")[0], *see.origins)
                reply = await agents.actor(task=asked, element=element_line(see, number))
                await page.step(reply["act"])
            return Outcome(answer=f"{page.total_reward:g}", stop_reason=page.stop_reason)


def element_line(see: str, number: str) -> TracedText:
    """Returns the line of a page's element, or `none` where the page has no such element."""
    lines = (line for line in see.split("\n")[1:] if line.partition(" ")[0] == number.strip().lstrip("0") != "")
    return TracedText.by(next(lines, NO_ELEMENT), *origins_of([see, number]))
