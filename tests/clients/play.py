"""play: agent frameworks by their documented defaults against a gateway: plain, tools, streaming, typed answer, forced call.

    tests/clients/make.sh openai3
    .cache/clients/openai3/bin/python tests/clients/play.py http://127.0.0.1:8000/v1 TEAM/AGENT FRAMEWORK ...

The model is that of `known_model`. Prints one JSON line per cell: {"framework", "version", "cell", "fault"}. A cell holds, and its fault is
empty, where the framework gives back what the model says: a text, the result of a call of the tool, pieces of a stream, an object of the type.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable

from cells import agent_teams, chains, openai_clients
from cells.asked import CALLS, Cells, fault_of

FRAMEWORKS: dict[str, Callable[[], Cells]] = {
    "openai": openai_clients.openai,
    "openai-agents": openai_clients.openai_agents,
    "instructor": openai_clients.instructor,
    "litellm": openai_clients.litellm,
    "langchain-openai": chains.langchain,
    "langgraph": chains.langgraph,
    "llama-index-llms-openai-like": chains.llama_index,
    "haystack-ai": chains.haystack,
    "pydantic-ai-slim": agent_teams.pydantic_ai,
    "smolagents": agent_teams.smolagents,
    "autogen-agentchat": agent_teams.autogen,
    "crewai": agent_teams.crewai,
    "dspy": agent_teams.dspy,
}
"""By the name of the package whose version is told."""
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
"""What keeps the frameworks from asking the internet."""


def main() -> None:
    """Prints a line per cell."""
    os.environ.update(QUIET)
    for name in sys.argv[3:]:
        version = importlib.metadata.version(name)
        for cell, play in FRAMEWORKS[name]().items():
            CALLS.clear()
            try:
                fault = fault_of(cell, play())
            except Exception as error:  # noqa: BLE001 - whatever a framework raises is the cell's fault
                fault = f"{type(error).__name__}: {error}"
            line = {"framework": name, "version": version, "cell": cell, "fault": " ".join(fault.split())[:1000]}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
