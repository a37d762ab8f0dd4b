"""draw: a workflow -> a Mermaid flowchart of which agents and tools read from which.

declared graph ──> its nodes and edges, with the conditions on them
traces         ──> the agents and tools that were called, and how often one read from another
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from serve_apps.extensions.graphs.graph import STOP, Graph
from stores.types import Trace

Kind = Literal["model", "tool", "choice", "ending"]
TASK, ANSWER = "(task)", "(answer)"
"""Names of the start and the end; no agent, tool or node can have them."""
SHAPES: Mapping[Kind, tuple[str, str]] = {
    "model": ("[", "]"),
    "tool": ("[[", "]]"),
    "choice": ("{", "}"),
    "ending": ("([", "])"),
}
"""Mermaid's brackets around the label of a node."""


@dataclass(kw_only=True)
class Drawing:
    """The nodes and edges of a flowchart."""

    title: str
    nodes: dict[str, Kind] = field(default_factory=dict)
    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    """Label by (from, to); empty where the edge has none."""

    def mermaid(self) -> str:
        """The flowchart as Mermaid text, which GitHub, GitLab, Jupyter and MkDocs show as a picture."""
        lines = ["---", f"title: {json.dumps(self.title)}", "---", "graph LR"]
        for name, kind in self.nodes.items():
            opening, closing = SHAPES[kind]
            lines.append(f'  {_id(name)}{opening}"{_quoted(_label(name))}"{closing}')
        for (source, target), label in self.edges.items():
            arrow = f'-- "{_quoted(label)}" -->' if label else "-->"
            lines.append(f"  {_id(source)} {arrow} {_id(target)}")
        return "\n".join(lines) + "\n"


def draw_graph(graph: Graph, *, title: str) -> Drawing:
    """Draws a declared graph, from the task to the answer."""
    drawing = Drawing(title=title)
    drawing.nodes[TASK] = "ending"
    for name, node in graph.nodes.items():
        drawing.nodes[name] = node.type
    drawing.nodes[ANSWER] = "ending"
    for name in graph.start:
        drawing.edges[TASK, name] = ""
    for edge in graph.edges:
        condition = edge.when.text if edge.when else ""
        earlier = drawing.edges.get((edge.source, edge.target))
        if (
            earlier is not None
        ):  # Edges between the same nodes are one arrow, which one without a condition always opens.
            condition = f"{earlier} or {condition}" if earlier and condition else ""
        drawing.edges[edge.source, edge.target] = condition
    for name in graph.nodes:
        if name in graph.end:
            drawing.edges[name, ANSWER] = ""
        elif STOP in graph.nodes[name].options:
            drawing.edges[name, ANSWER] = f'{name}.choice == "{STOP}"'
    return drawing


def draw_traces(traces: Iterable[Trace], *, title: str) -> Drawing:
    """Draws recorded episodes. An edge's label is the share of the reader's calls that read from there; none means all."""
    drawing = Drawing(title=title)
    drawing.nodes[TASK] = "ending"
    reads: Counter[tuple[str, str]] = Counter()
    calls: Counter[str] = Counter()
    for trace in traces:
        turns = {t.turn_index: (t.agent, t.parents) for t in trace.turns}
        events = turns | {c.call_index: (c.tool, c.parents) for c in trace.tool_calls}
        for index in sorted(events):
            name, parents = events[index]
            drawing.nodes.setdefault(name, "model" if index in turns else "tool")
            calls[name] += 1
            for source in {events[parent][0] for parent in parents if parent in events} or {TASK}:
                reads[source, name] += 1
        if events:
            reads[events[max(events)][0], ANSWER] += 1
            calls[ANSWER] += 1
    drawing.nodes[ANSWER] = "ending"
    for (source, target), count in reads.items():
        share = count / calls[target]
        drawing.edges[source, target] = "" if share == 1 else f"{share:.0%}"
    return drawing


def _label(name: str) -> str:
    return name.strip("()")


def _id(name: str) -> str:
    """An id that Mermaid accepts. The prefix keeps an agent called `answer` apart from the end."""
    return ("e_" if name in (TASK, ANSWER) else "n_") + re.sub(r"\W", "_", _label(name))


def _quoted(text: str) -> str:
    return text.replace('"', "#quot;").replace("\n", " ")
