"""program: question -> answer, by an agent written against the `openai` client that calls a calculator tool.

python -m pipelines.examples.calculator.program "7+6*8"     (OPENAI_BASE_URL and OPENAI_API_KEY select the model)
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
    """Returns the model's answer, or an empty text if it still calls tools after `MAX_CALLS` calls."""
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
    """Returns the result of the tool, which adds or multiplies two numbers."""
    try:
        match = re.fullmatch(r"\s*(\d{1,1000})\s*([+*])\s*(\d{1,1000})\s*", json.loads(arguments)["expression"])
    except (KeyError, TypeError, ValueError):
        match = None
    if match is None:
        return "error: a+b or a*b"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1], AsyncOpenAI())))
