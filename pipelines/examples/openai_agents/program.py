"""program: a line of JSON per episode -> a line with its answer, by two agents of the OpenAI Agents SDK.

    triage ──transfer_to_calculator──> calculator ──calculate──> ... ──> the answer

It runs in an environment of its own (`requirements.txt`), and knows of Troupe what the lines hold. By hand, against any server:

    echo '{"id": "1", "prompt": "7+6*8", "base_url": "http://127.0.0.1:8000/v1", "api_key": "none"}' | python program.py
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MAX_TURNS = 6
"""The largest number of model calls of one episode."""


@function_tool
def calculate(expression: str) -> str:
    """Add or multiply two numbers."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*([+*])\s*(\d{1,9})\s*", expression)
    if match is None:
        return "error: a+b or a*b"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


calculator = Agent(name="calculator", model="calculator", instructions="Solve it by the tool.", tools=[calculate])
triage = Agent(name="triage", model="triage", instructions="Hand sums over.", handoffs=[calculator])


async def answer(question: str, client: AsyncOpenAI) -> str:
    """Returns the answer of the agent that has the last word."""
    settings = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    result = await Runner.run(triage, question, max_turns=MAX_TURNS, run_config=settings)
    return str(result.final_output)


async def main() -> None:
    """Plays the episodes of standard input, one after the other."""
    http = DefaultAsyncHttpxClient()  # one for all episodes: to make it takes longer than a call
    for line in sys.stdin:
        episode = json.loads(line)
        client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], http_client=http)
        try:
            reply = {"answer": await answer(episode["prompt"], client)}
        except Exception as error:  # noqa: BLE001 - whatever ends an episode, the process stays for the next one
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": episode["id"], **reply}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
