"""Functions that are programs, for the processes that play them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from pipelines.examples.calculator.program import TOOLS, calculate

BELOW_100 = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["value"],
    "additionalProperties": False,
}
NUM_PLAYED = [0]


def ask(prompt: str, client: Any) -> str:
    """Answers as the model does."""
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
    return str(reply.choices[0].message.content)


async def closes(prompt: str, client: Any) -> str:
    """Closes its client when it is done, as openai's documentation does."""
    async with client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
    return str(reply.choices[0].message.content)


async def forced_and_typed(prompt: str, client: Any) -> str:
    """Forces a call of the calculator, and then asks for the answer as an integer below 100."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    forced = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, tool_choice="required")
    messages.append(forced.choices[0].message)
    for call in forced.choices[0].message.tool_calls or ():
        result = calculate(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": BELOW_100}}
    reply = await client.chat.completions.create(model="m", messages=messages, response_format=form)
    try:
        return str(json.loads(reply.choices[0].message.content)["value"])
    except (TypeError, ValueError):  # a demonstration's bare number, or what the token limit cut
        return str(reply.choices[0].message.content)


def leave(prompt: str, client: Any) -> str:
    """Leaves the interpreter after a call."""
    ask(prompt, client)
    return sys.exit("cannot read this")


def do_as_told(prompt: str, client: Any) -> dict[str, Any]:
    """Prints, and then sleeps, raises, dies, or says how many episodes its process has played."""
    print("a word for a reader")
    NUM_PLAYED[0] += 1
    answer = ask(prompt, client)
    if answer == "sleep":
        time.sleep(60)
    if answer == "raise":
        raise ValueError("no such planet")
    if answer == "die":
        os._exit(3)
    return {
        "answer": answer,
        "metadata": {"process": os.getpid(), "num_played": NUM_PLAYED[0], "user": os.environ.get("USER")},
    }
