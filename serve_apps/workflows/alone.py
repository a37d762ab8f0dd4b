"""alone: one agent of another workflow, which solves a task alone: it answers until it has spent its tokens, and the majority counts.

The control for a team: it has the same model, the same prompt and as many completion tokens (self-consistency, arXiv 2203.11171).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow, load_workflow
from stores.types import Task

PATH = "serve_apps.workflows.alone:Alone"
"""The path by which the control's episodes name their workflow."""


class Alone(Workflow):
    """Runs one agent of another workflow."""

    def __init__(
        self, workflow: str, agent: str, answer: str, budget_tokens: float, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Sets the workflow up.

        Args:
            workflow, settings: those of the other workflow, as in a run config.
            agent: the name of its agent; its prompt has one input, which is the task.
            answer: the field of its contract that is the answer.
            budget_tokens: it answers again while it has sampled fewer completion tokens; the last answer may go beyond.
        """
        role = load_workflow(workflow, settings or {}).agents[agent]
        self.name, self.answer, self.budget_tokens = agent, answer, budget_tokens
        self.input = task_input(agent, role)
        self.agents = {agent: role}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the most frequent answer, of several the first one; an empty answer has no vote."""
        spent, votes = 0, Counter[str]()
        while not spent or spent < self.budget_tokens:
            reply = await agents[self.name](**{self.input: task.prompt})
            spent += max(reply.num_tokens, 1)
            if reply[self.answer]:
                votes[str(reply[self.answer])] += 1
        answer = votes.most_common(1)[0][0] if votes else ""
        return Outcome(answer=answer, metadata={"votes": dict(votes)})


def task_input(name: str, agent: Agent) -> str:
    """The one input of an agent's prompt; ValueError where it has another number of them."""
    if len(agent.inputs) != 1:
        raise ValueError(
            f"agent {name!r} cannot solve a task alone: its prompt has the inputs {', '.join(sorted(agent.inputs)) or 'of none'}, and alone "
            "it is given the task and nothing else: name an agent whose prompt has one input"
        )
    return next(iter(agent.inputs))
