"""typed_tool: one agent answers `a+b*c` and hands the number to a tool that takes integers only; its demonstrator writes words, too.

A reply whose answer is no integer is a malformed call: the tool refuses it, and the episode fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Purpose, Task

SHARE_RIGHT, SHARE_MALFORMED = 0.35, 0.3
WORDS = ("many", "a lot", "some", "few")


async def _note(number: int) -> str:
    return str(number)


class TypedTool(Workflow):
    """Answers through a typed tool."""

    solver = Agent(prompt="{question}=?\nReply <ANSWER>number</ANSWER>", contract=Tags("ANSWER"))
    note = Tool(_note)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the number that the tool took. Demonstrations pass it by: they would have to run to their end."""
        reply = await agents.solver(question=task.prompt)
        if agents.episode.purpose is Purpose.DEMONSTRATION:
            return Outcome(answer=reply["answer"])
        return Outcome(answer=await tools.note(number=reply["answer"]))


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion: right, malformed, or the sum of the first two numbers; the same `rng` state gives the same text."""
    a, b, c = (int(n) for n in re.findall(r"\d+", task.prompt)[:3])
    drawn = rng.random()
    right = drawn < SHARE_RIGHT
    answer = str(a + b * c) if right else rng.choice(WORDS) if drawn < SHARE_RIGHT + SHARE_MALFORMED else str(a + b)
    return f"<ANSWER>{answer}</ANSWER>"
