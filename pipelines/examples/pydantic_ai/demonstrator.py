"""demonstrator: agent, task, inputs -> a completion: it plays the model of the calculator agent, whose answer is a call, too.

Its habits are those of `pipelines.examples.calculator.demonstrator`, but that every completion is a call in the form that the constraint
allows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from pipelines.examples.calculator import demonstrator as calculator
from stores.types import Task


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    text = calculator.demonstrate(agent, task, inputs, rng)
    return text if text.startswith("<tool_call>") else _answer(text)


def _answer(text: str) -> str:
    """Returns the call that gives the answer; what is no number, such as a tool's error, becomes 0."""
    value = int(text) if text.isdigit() else 0
    return f"<tool_call>{json.dumps({'name': 'final_result', 'arguments': {'value': value}})}</tool_call>"
