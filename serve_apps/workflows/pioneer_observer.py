"""Pioneer and observer: one answers, the other answers having read it; the roles change places in turn (CORY)."""

from __future__ import annotations

from typing import Any

from serve_apps.agent import Agent, Said
from serve_apps.contracts import Tags
from serve_apps.workflow import Outcome, Workflow
from stores.types import Task

PROMPT = (
    "Solve the problem step by step. Reply with <SOLUTION>steps</SOLUTION><ANSWER>answer</ANSWER> only.\n"
    "{reference}Problem: {question}"
)


class PioneerObserver(Workflow):
    """Two agents of different model groups, `first` and `second`; the credit rule pays both with r1 + r2.

    Who is the pioneer changes every `swap_every` iterations.
    """

    first = Agent(prompt=PROMPT, contract=Tags("SOLUTION", "ANSWER"), cut=("reference",))
    second = Agent(prompt=PROMPT, contract=Tags("SOLUTION", "ANSWER"), cut=("reference",))

    def __init__(self, swap_every: int = 5) -> None:
        """Args: swap_every: iterations between two exchanges; 0: never."""
        self.swap_every = swap_every

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """The observer's answer."""
        pioneer, observer = ("second", "first") if self._is_swapped(agents.episode.iteration) else ("first", "second")
        draft = await agents[pioneer](question=task.prompt, reference="")
        reference = Said.joined("Another solution: ", draft["solution"], " Answer: ", draft["answer"], "\n")
        final = await agents[observer](question=task.prompt, reference=reference)
        return Outcome(answer=final["answer"], metadata={"pioneer": pioneer})

    def _is_swapped(self, iteration: int) -> bool:
        return bool(self.swap_every) and (max(iteration, 1) - 1) // self.swap_every % 2 == 1
