"""A tiny grader: it says `<score>10</score>` of an answer whose last digit is even, and `<score>0</score>` of others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from stores.types import Task

PROMPT = "Task: {task} Answer: {answer}"
"""What the grader is asked, in training and as a judge."""


class Grader(Workflow):
    """One agent that reads what it is asked as it is."""

    grader = Agent(prompt="{asked}", contract=Tags("score"), max_tokens=16)

    async def run(self, task: Any, agents: Any, tools: Any) -> Outcome:
        """Asks the grader."""
        said = await agents.grader(asked=task.prompt)
        return Outcome(answer=said["score"])


def generate(*, seed: int, split: str, count: int) -> list[Task]:
    """Returns answers to grade; each split has its own numbers."""
    dice = random.Random(f"{seed}/{split}")
    first = {"train": 0, "gate": 1, "test": 2}[split]
    tasks = {}
    while len(tasks) < count:
        a, b, answer = 3 * dice.randrange(1, 40) + first, dice.randrange(1, 7), dice.randrange(1, 200)
        name = f"{a}+{b}={answer}"
        prompt = PROMPT.format(task=f"{a}+{b}", answer=answer)
        tasks[name] = Task(task_id=name, prompt=prompt, answers=(score_of(str(answer)),))
    return list(tasks.values())


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns what a grader says that makes no fault."""
    return f"<score>{score_of(task.prompt)}</score>"


def score_of(text: str) -> str:
    """Returns 10 where the last digit of an answer is even."""
    return "10" if text[-1] in "02468" else "0"
