"""program: a line of JSON per episode -> a line with its answer, by an agent of Pydantic AI whose answer has a type.

    calculator ──calculate──> ... ──final_result──> Answer(value=55)

By default Pydantic AI makes the answer a tool, too, and every turn must call one: Troupe samples these turns under a constraint.
It runs in an environment of its own (`requirements.txt`), and knows of Troupe what the lines hold. By hand, against any server:

    echo '{"id": "1", "prompt": "7+6*8", "base_url": "http://127.0.0.1:8000/v1", "api_key": "none"}' | python program.py
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

LIMITS = UsageLimits(request_limit=4)
"""The largest number of model calls of one episode."""


class Answer(BaseModel):
    """The result of the sum."""

    value: int


agent = Agent(output_type=Answer)


@agent.tool_plain
def calculate(expression: str) -> str:
    """Add or multiply two numbers."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*([+*])\s*(\d{1,9})\s*", expression)
    if match is None:
        return "error: a+b or a*b"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


async def answer(question: str, provider: OpenAIProvider) -> str:
    """Returns the value of the agent's answer."""
    result = await agent.run(question, model=OpenAIChatModel("calculator", provider=provider), usage_limits=LIMITS)
    return str(result.output.value)


async def main() -> None:
    """Plays the episodes of standard input, one after the other."""
    for line in sys.stdin:
        episode = json.loads(line)
        provider = OpenAIProvider(base_url=episode["base_url"], api_key=episode["api_key"])
        try:
            reply = {"answer": await answer(episode["prompt"], provider)}
        except Exception as error:  # noqa: BLE001 - whatever ends an episode, the process stays for the next one
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": episode["id"], **reply}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
