"""table: which cells are played of which framework, and in which environment (`make.sh`).

    python -m tests.clients.table    prints the table of infra/docs/results.md

A cell is a kind, and after a comma which way of several. Of "typed" and "forced" the first is the framework's documented default. Frameworks that
have no cell of a kind offer no such thing, or it is another cell: instructor's and langgraph's typed answers are forced calls and forms.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
KINDS = {
    "plain": "plain",
    "tools": "tools",
    "streaming": "streaming",
    "typed": "typed answer",
    "forced": "forced call",
}
_CELLS: dict[str, dict[str, str]] = {
    # environment: package: cells
    "openai3": {
        "openai": "plain; tools; streaming; typed; forced; forced, named; plain, responses; streaming, responses; typed, responses; forced, responses",
        "openai-agents": "plain; tools; streaming; typed; forced",
        "litellm": "plain; tools; streaming; typed; forced; plain, text completion",
        "langchain-openai": "plain; tools; streaming; typed; typed, function calling; typed, JSON mode; forced; forced, any",
        "langgraph": "plain; tools; streaming; typed",
        "haystack-ai": "plain; tools; streaming; typed; forced",
        "pydantic-ai-slim": "plain; tools; streaming; typed; typed, native; typed, prompted; forced",
        "smolagents": "plain; tools; streaming; typed; forced",
        "autogen-agentchat": "plain; tools; tools, reflected; streaming; typed; forced",
        "dspy": "plain; tools; streaming; typed",
    },
    "openai2": {
        "crewai": "plain; tools; streaming; typed",
        "llama-index-llms-openai-like": "plain; tools; streaming; typed; forced; plain, text completion",
    },
    "instructor": {
        "instructor": "typed; typed, streamed",
    },
    "node": {
        "node:openai": "plain; tools; streaming; typed; forced; plain, responses; streaming, responses",
        "node:@ai-sdk/openai-compatible": "plain; tools; streaming; typed; typed, output; typed, streamed; forced; forced, named",
        "node:@ai-sdk/openai": "plain; tools; streaming; typed; typed, output; typed, streamed; forced; forced, named",
    },
}
ENVIRONMENTS = {
    environment: {package: tuple(cells.split("; ")) for package, cells in packages.items()}
    for environment, packages in _CELLS.items()
}
CELLS = {framework: cells for frameworks in ENVIRONMENTS.values() for framework, cells in frameworks.items()}
ENVIRONMENT_OF = {framework: name for name, frameworks in ENVIRONMENTS.items() for framework in frameworks}


def versions() -> dict[str, str]:
    """The version of each framework, by the locks."""
    locks = {name: (HERE / "locks" / f"{name}.txt").read_text() for name in ENVIRONMENTS if name != "node"}
    packages = json.loads((HERE / "node" / "package-lock.json").read_text())["packages"]
    found = {}
    for framework, environment in ENVIRONMENT_OF.items():
        if environment == "node":
            found[framework] = packages[f"node_modules/{framework.removeprefix('node:')}"]["version"]
        else:
            (found[framework],) = re.findall(rf"^{re.escape(framework)}==([^\s;]+)", locks[environment], re.MULTILINE)
    return found


def markdown() -> str:
    """The table as the documentation shows it: "ok", and the further ways that hold besides the default."""
    lines = ["| framework | " + " | ".join(KINDS.values()) + " |", "|" + "---|" * (len(KINDS) + 1)]
    version_of = versions()
    for framework, cells in CELLS.items():
        ways: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for cell in cells:
            kind, _, way = cell.partition(", ")
            ways[kind].append(way)
        package = framework.removeprefix("node:")
        name = f"node: {package}" if package != framework else package
        lines.append(f"| {name} {version_of[framework]} | " + " | ".join(map(_shown, ways.values())) + " |")
    return "\n".join(lines)


def _shown(ways: list[str]) -> str:
    further = [way for way in ways if way]
    if not further:
        return "ok" if ways else ""
    return ("ok; " if "" in ways else "") + "; ".join(f"{way}: ok" for way in further)


if __name__ == "__main__":
    print(markdown())
