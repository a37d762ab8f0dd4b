"""program: a line of JSON per episode -> a line with its answer, by a graph of LangGraph in which a model calls a tool.

    START ──> model ──calls──> tools ──> model ──> ... ──> END

It runs in an environment of its own (`requirements.txt`), and knows of Troupe what the lines hold. By hand, against any server:

    echo '{"id": "1", "prompt": "7+6*8", "base_url": "http://127.0.0.1:8000/v1", "api_key": "none"}' | python program.py
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MAX_STEPS = 8
"""The largest number of visits of nodes in one episode."""


@tool
def calculate(expression: str) -> str:
    """Add or multiply two numbers."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*([+*])\s*(\d{1,9})\s*", expression)
    if match is None:
        return "error: a+b or a*b"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)


def build_graph(chat: ChatOpenAI) -> Any:
    """Returns the graph, compiled, around a chat model."""
    model = chat.bind_tools([calculate])

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([calculate]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def answer(question: str, chat: ChatOpenAI) -> str:
    """Returns the text of the graph's last message."""
    state = {"messages": [{"role": "user", "content": question}]}
    end = await build_graph(chat).ainvoke(state, {"recursion_limit": MAX_STEPS})
    return str(end["messages"][-1].content)


async def main() -> None:
    """Plays the episodes of standard input, one after the other."""
    http, async_http = httpx.Client(), httpx.AsyncClient()  # for all episodes: to make them takes longer than a call
    for line in sys.stdin:
        episode = json.loads(line)
        chat = ChatOpenAI(
            model="calculator",
            base_url=episode["base_url"],
            api_key=episode["api_key"],
            http_client=http,
            http_async_client=async_http,
        )
        try:
            reply = {"answer": await answer(episode["prompt"], chat)}
        except Exception as error:  # noqa: BLE001 - whatever ends an episode, the process stays for the next one
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": episode["id"], **reply}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
