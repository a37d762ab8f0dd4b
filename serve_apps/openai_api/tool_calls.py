"""tool_calls: the text of a completion -> the functions that it calls, in the format of Hermes and Qwen.

text before <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call> <tool_call>...
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """One call of a function."""

    name: str
    arguments: str
    """JSON text of an object."""


def parse_tool_calls(text: str, known: Collection[str]) -> tuple[str, list[CalledTool]]:
    """Returns the text outside calls, and the calls. What is not a call of a known function stays text, unchanged."""
    calls = []
    texts = []
    end = 0
    for match in re.finditer(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", text, re.DOTALL):
        call = _parse_call(match[1], known)
        if call is None:
            continue
        texts.append(text[end : match.start()])
        end = match.end()
        calls.append(call)
    rest = "".join([*texts, text[end:]])
    return rest.strip() if calls else rest, calls


def message_of(text: str, content: str, calls: Sequence[CalledTool], *, id_prefix: str) -> dict[str, Any]:
    """Returns a completion as an assistant's message in OpenAI's form.

    Args:
        content: the text outside the calls.
        id_prefix: what the ids of the calls are derived from; they have nine letters or digits, as every template takes them.
    """
    if not calls:
        return {"role": "assistant", "content": text, "refusal": None}
    tool_calls = [
        {
            "id": sha256(f"{id_prefix}_{i}".encode()).hexdigest()[:9],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": tool_calls}


def _parse_call(text: str, known: Collection[str]) -> CalledTool | None:
    """The call in the text between the tags; None where it is not a call of a known function."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or an integer of more digits than Python reads
        return None
    if not isinstance(data, dict) or data.get("name") not in known:
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return CalledTool(name=data["name"], arguments=json.dumps(arguments))
