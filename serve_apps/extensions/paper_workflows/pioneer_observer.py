"""pioneer_observer: one agent answers, the other reads that and answers, too (CORY, arXiv 2410.06101)."""

from __future__ import annotations

from typing import Any

from serve_apps.authoring.agent import Agent, TracedText
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

PROMPT = (
    "Solve the problem step by step. Reply with <SOLUTION>steps</SOLUTION><ANSWER>answer</ANSWER> only.\n"
    "{reference}Problem: {question}"
)


class PioneerObserver(Workflow):
    """Runs two agents of different model groups; the credit rule pays both with r1 + r2.

    The two models exchange their agents with the run config's `swap: {groups: [a, b], every: 5}`.
    """

    pioneer = Agent(prompt=PROMPT, contract=Tags("SOLUTION", "ANSWER"), cut=("reference",))
    observer = Agent(prompt=PROMPT, contract=Tags("SOLUTION", "ANSWER"), cut=("reference",))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the observer's answer."""
        draft = await agents.pioneer(question=task.prompt, reference="")
        reference = TracedText.joined("Another solution: ", draft["solution"], " Answer: ", draft["answer"], "\n")
        final = await agents.observer(question=task.prompt, reference=reference)
        return Outcome(answer=final["answer"])
