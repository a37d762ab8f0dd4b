"""asked: the question, tool and type that all cells share, and what a framework must give back for a cell to hold.

The model (`known_model`) says "6 times 7 is 42.", calls `multiply(6, 7)` where it is offered, and fills an object with the value 42.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
KEY = os.environ.get("OPENAI_API_KEY", "none")
GROUP = os.environ.get("GROUP", MODEL.rpartition("/")[0] + "/group/model")
"""The model's name for bare completions."""
QUESTION = "What is 6 times 7? Answer with a number."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ARGUMENTS = {"a": 6, "b": 7}
CALLS: list[dict[str, int]] = []
"""The calls of `multiply` since the cell began."""


class Answer(BaseModel):
    """A typed answer."""

    value: int


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    CALLS.append({"a": a, "b": b})
    return a * b


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": PARAMETERS}}

Cells = dict[str, Callable[[], Any]]
"""What a framework does, by the name of the cell: its kind, and after a comma which way of several."""


def fault_of(cell: str, value: Any) -> str:
    """Returns why a cell does not hold; empty where it does.

    Args:
        value: plain, tools: the text of the answer. streaming: its pieces. typed: the number in the object. forced: the arguments of the
            call, as an object or as JSON.
    """
    kind = cell.partition(",")[0]
    if kind == "streaming":
        pieces = [piece for piece in value if piece]
        return "" if len(pieces) > 1 and "42" in "".join(pieces) else f"pieces {pieces}"
    if kind == "typed":
        return "" if value == 42 else f"value {value!r}"
    if kind == "forced":
        arguments = json.loads(value) if isinstance(value, str) else value
        return "" if arguments == ARGUMENTS else f"arguments {arguments!r}"
    if kind == "tools" and ARGUMENTS not in CALLS:
        return f"the tool was not called; {value!r}"
    return "" if "42" in str(value) else f"text {value!r}"
