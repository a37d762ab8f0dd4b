"""A calculator agent, as one writes it against the `openai` client: it asks a model, runs the tool that it calls, asks again.

python calculator.py "7+6*8"     (OPENAI_BASE_URL and OPENAI_API_KEY lead to the model)
"""

import asyncio
import json
import re
import sys
from typing import Any

from openai import AsyncOpenAI

TEXT = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "calculate", "parameters": TEXT}}]
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
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculate(arguments: str) -> str:
    """What the tool answers: it adds or multiplies two numbers."""
    try:
        found = re.fullmatch(r"\s*(\d+)\s*([+*])\s*(\d+)\s*", json.loads(arguments)["expression"])
    except (KeyError, TypeError, ValueError):
        found = None
    if found is None:
        return "error: a+b or a*b"
    a, b = int(found[1]), int(found[3])
    return str(a + b if found[2] == "+" else a * b)


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1], AsyncOpenAI())))
