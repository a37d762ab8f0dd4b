"""A calculator agent, as one writes it against the `openai` client: it asks a model, runs the tools that it calls, asks again.

python calculator.py "7+6*8"     (OPENAI_BASE_URL and OPENAI_API_KEY lead to the model)
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "multiply", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "add", "parameters": NUMBERS}},
]
MAX_CALLS = 4


async def answer(question: str, client: AsyncOpenAI) -> str:
    """The model's answer, or none where it still calls tools after `MAX_CALLS` calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model="calculator", messages=messages, tools=TOOLS)
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculate(name: str, arguments: str) -> str:
    """What a tool answers."""
    try:
        numbers = json.loads(arguments)
        a, b = int(numbers["a"]), int(numbers["b"])
    except (KeyError, TypeError, ValueError):
        return "error: give a and b"
    return str(a * b if name == "multiply" else a + b)


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1], AsyncOpenAI())))
