"""tool_calls: what a model wrote -> the functions that it calls, in the form of Hermes and Qwen.

text before <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call> <tool_call>...
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """One call."""

    name: str
    arguments: str
    """JSON text of an object."""


def parse_tool_calls(text: str, known: Collection[str]) -> tuple[str, list[CalledTool]]:
    """The text outside calls, and the calls. What is no call of a known function stays text, as the model wrote it."""
    calls = []
    kept = []
    end = 0
    for match in re.finditer(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", text, re.DOTALL):
        call = _call(match[1], known)
        if call is None:
            continue
        kept.append(text[end : match.start()])
        end = match.end()
        calls.append(call)
    rest = "".join([*kept, text[end:]])
    return rest.strip() if calls else rest, calls


def assistant_message(text: str, known: Collection[str], *, id_prefix: str) -> dict[str, Any]:
    """A completion as OpenAI's message; `tool_calls`, with ids of this prefix, where it calls known functions."""
    kept, calls = parse_tool_calls(text, known) if known else (text, [])
    if not calls:
        return {"role": "assistant", "content": text, "refusal": None}
    found = [
        {
            "id": f"{id_prefix}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": kept or None, "refusal": None, "tool_calls": found}


def _call(text: str, known: Collection[str]) -> CalledTool | None:
    try:
        data: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("name") not in known:
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return CalledTool(name=data["name"], arguments=json.dumps(arguments))
