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

from serve_apps.authoring import thinking
from serve_apps.authoring.json_text import json_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
CALL_OR_TAG = re.compile(
    r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<function=(?:(?!<function=).)*?</function>|</?think>", re.DOTALL
)
"""A closed call in the format of Hermes or of Qwen3-Coder, or a tag of thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """One call of a function."""

    name: str
    arguments: str
    """JSON text of an object."""


def parse_tool_calls(text: str, known: Collection[str]) -> tuple[str, list[CalledTool]]:
    """Returns the text outside calls, and the calls.

    What is not a call of a known function stays text, unchanged; so does what a model writes in its thoughts.
    """
    calls = []
    texts = []
    end = 0
    for begin, stop in said_parts(text):
        for match in CALL.finditer(text, begin, stop):
            call = _parse_call(match[1], known)
            if call is None:
                continue
            texts.append(text[end : match.start()])
            end = match.end()
            calls.append(call)
    rest = "".join([*texts, text[end:]])
    return rest.strip() if calls else rest, calls


def said_parts(text: str) -> list[tuple[int, int]]:
    """Returns begin and end of each part of a text that is outside of thoughts, in their order.

    A template may have written the opening tag into the prompt: then the part before the closing one is a thought. Thoughts
    that were cut reach to the end. Tags of thoughts within a closed call are data.
    """
    parts = []
    begin: int | None = 0
    for tag in CALL_OR_TAG.finditer(text):
        if tag[0] == thinking.CLOSE:
            begin = tag.end()
        elif tag[0] == thinking.OPEN and begin is not None:
            parts.append((begin, tag.start()))
            begin = None
    return parts if begin is None else [*parts, (begin, len(text))]


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
    """Returns the call in the text between the tags; None where it is not a call of a known function.

    Arguments may be called `parameters`, as in Llama's format.
    """
    data = json_object(text)
    if data is None or not isinstance(data.get("name"), str) or data["name"] not in known:
        return None
    argument_keys = [key for key in ("arguments", "parameters") if key in data]
    if len(argument_keys) > 1 or (not argument_keys and data.keys() - {"name", "id", "type"}):
        return None  # arguments under another name: a call without them would be another call
    arguments = data[argument_keys[0]] if argument_keys else {}
    if not isinstance(arguments, dict):
        return None
    return CalledTool(name=data["name"], arguments=json.dumps(arguments))
