"""demonstrator: agent, task, inputs -> a completion: it plays the model of the calculator agent on `a+b*c`, as often wrong as a real base model.

Its habits: it adds before it multiplies, stops after the first tool, multiplies the wrong pair, leaves a call's end out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping

from stores.types import Task


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    a, b, c = (int(n) for n in re.findall(r"\d+", task.prompt)[:3])
    results = [m["content"] for m in json.loads(inputs["messages"]) if m["role"] == "tool"]
    if not results:
        return _call(f"{b}*{c}" if rng.random() < 0.6 else rng.choice([f"{a}+{b}", f"{a}*{b}"]), rng)
    last = results[-1]
    if len(results) > 1 or not last.isdigit() or rng.random() < 0.3:
        return last
    return _call(f"{a}+{last}", rng)


def _call(expression: str, rng: random.Random) -> str:
    text = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<tool_call>{text}" + ("</tool_call>" if rng.random() > 0.05 else "")
