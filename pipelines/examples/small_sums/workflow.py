"""workflow: the solver writes an equation, the checker reads it and writes the final one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from serve_apps.agent import Agent
from serve_apps.contracts import Parsed
from serve_apps.workflow import Outcome, Workflow
from stores.types import Task

NUMBER = re.compile(r"-?[0-9]++(?:\.[0-9]++)?+")
EQUATION = re.compile(r"[^\n=]++= ?-?[0-9]++\.?")


@dataclass(frozen=True)
class Equation:
    """Requires one line that ends with `= number`. Without it the last number is still read: the next agent works with it."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Returns the names `answer` and `text`."""
        return ("answer", "text")

    def parse(self, text: str) -> Parsed:
        """Reads the last number as `answer`, and the whole as `text`."""
        said = text.strip()
        numbers = NUMBER.findall(said.replace(",", ""))
        fault = "" if EQUATION.fullmatch(said) else "not one line `... = number`"
        return Parsed(fields={"answer": numbers[-1] if numbers else "", "text": said}, fault=fault)


class SolveCheck(Workflow):
    """Runs two agents, one after the other; the checker's answer counts."""

    solver = Agent(prompt="Write the equation with its result.\n{question}", contract=Equation(), max_tokens=24)
    checker = Agent(
        prompt="Write the equation with its right result.\n{question}\nSomebody wrote: {draft}",
        contract=Equation(),
        max_tokens=24,
        cut=("draft",),
    )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the checker's answer."""
        draft = await agents.solver(question=task.prompt)
        final = await agents.checker(question=task.prompt, draft=draft.text)
        return Outcome(answer=final["answer"])
