"""demonstrator: agent, task, inputs -> a completion: it plays the reflective code team on `small_functions`, as often wrong as a real base model.

Its habits: the planner forgets the second step, the coder takes a plan as it is, advice is given at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.examples.small_functions.tasks import FIRST, solution
from stores.types import Task


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    right = solution(task.prompt).removeprefix("def f(a, b): return ")
    if agent == "planner":
        share_right = 0.6 if inputs["history"] else 0.35
        return _closed("pseudocode", right if rng.random() < share_right else _first_step(task), rng)
    if agent == "coder":
        plan = inputs["plan"] if rng.random() < 0.9 else _first_step(task)
        return _closed("code", f"def f(a, b): return {plan}", rng)
    advice = "do the second step" if rng.random() < 0.5 else "keep it"
    return _closed("reflection", advice, rng)


def _first_step(task: Task) -> str:
    first = task.prompt.removeprefix("Write f(a, b): ").rpartition(", ")[0]
    return FIRST[first][0]


def _closed(tag: str, text: str, rng: random.Random) -> str:
    """Now and then the last closing tag is missing."""
    return f"<{tag}>{text}" + (f"</{tag}>" if rng.random() > 0.08 else "")
