"""Functions that are programs, for the processes that play them."""

from __future__ import annotations

import asyncio
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


def says_json(prompt: str, client: Any) -> Any:
    """Returns the data that the model says."""
    return json.loads(ask(prompt, client))


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


async def asks_again_after_a_tool(prompt: str, client: Any) -> str:
    """Has a call answered, and asks whether the model is sure."""
    return await _conversation(client, [prompt, "Are you sure?"])


async def conversations_at_once(prompt: str, client: Any) -> str:
    """Three conversations of one agent, each with a tool, at once."""
    return await _at_once(prompt, client, ["Rome", "Bonn", "Oslo"])


async def conversations_in_another_order(prompt: str, client: Any) -> str:
    """The same, as they reach a busy machine another time."""
    return await _at_once(prompt, client, ["Oslo", "Rome", "Bonn"])


async def _at_once(prompt: str, client: Any, cities: list[str]) -> str:
    return " ".join(await asyncio.gather(*(_conversation(client, [f"{prompt} in {city}"]) for city in cities)))


async def _conversation(client: Any, questions: list[str]) -> str:
    messages: list[Any] = []
    answer = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0].message
        if reply.tool_calls:
            messages.append(reply.model_dump(exclude_none=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"{calculate(call.function.arguments)} in {question[-4:]}",
                }
                for call in reply.tool_calls
            ]
            reply = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0].message
        messages.append({"role": "assistant", "content": reply.content})
        answer = str(reply.content)
    return answer


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
