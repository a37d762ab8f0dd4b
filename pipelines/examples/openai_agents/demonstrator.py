"""demonstrator: agent, task, inputs -> a completion: it plays the models of triage and calculator, as often wrong as a real base model.

Triage hands over, or answers with the first number; the calculator has the habits of `pipelines.examples.calculator.demonstrator`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping

from pipelines.examples.calculator import demonstrator as calculator
from stores.types import Task

HAND_OVER = '<tool_call>{"name": "transfer_to_calculator", "arguments": {}}</tool_call>'


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "triage":
        return HAND_OVER if rng.random() < 0.6 else re.findall(r"\d+", task.prompt)[0]
    messages = [m for m in json.loads(inputs["messages"]) if m["role"] != "tool" or "assistant" not in m["content"]]
    return calculator.demonstrate(agent, task, {**inputs, "messages": json.dumps(messages)}, rng)
