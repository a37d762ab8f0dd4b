"""workflow: the solver writes an equation, the checker reads it and writes the final one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Parsed
from serve_apps.authoring.workflow import Outcome, Workflow
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


class TwoSteps(Workflow):
    """Runs two agents on a task of two steps: the first multiplies, the second goes on with what the first found."""

    first = Agent(prompt="Write the equation with its result.\nWhat is {step}?", contract=Equation(), max_tokens=24)
    second = Agent(
        prompt="Write the equation with its result.\nWhat is {found} {step}?", contract=Equation(), max_tokens=24
    )

    def check_task(self, task: Task, place: str) -> None:
        """Raises ValueError for a task that does not name both steps."""
        for step in ("first", "then"):
            if not isinstance(task.metadata.get(step), str):
                raise ValueError(
                    f"{place}: metadata.{step} is no text: a task names its steps, as `first: 7 * 8`, `then: + 5`"
                )

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the second agent's answer."""
        product = await agents.first(step=task.metadata["first"])
        final = await agents.second(found=product["answer"], step=task.metadata["then"])
        return Outcome(answer=final["answer"])


class OneStep(Workflow):
    """Runs one agent on the same tasks, which may write as many tokens as both: what `TwoSteps` is compared with."""

    solver = Agent(prompt="Write the equation with its result.\n{question}", contract=Equation(), max_tokens=48)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the agent's answer."""
        final = await agents.solver(question=task.prompt)
        return Outcome(answer=final["answer"])
