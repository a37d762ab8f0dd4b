"""draw: a workflow -> a picture of who passes what on to whom: Mermaid text and SVG.

declared graph ──> its nodes and edges, conditions on them
traces         ──> agents and tools that were called, and how often one read from another
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from serve_apps.graph import Graph
from stores.types import Trace

Kind = Literal["model", "tool", "ending"]
TASK, ANSWER = "(task)", "(answer)"
"""The two endings; no agent, tool or node can be called so."""
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN, SIDE = 150, 40, 50, 70, 20, 150
COLORS: Mapping[str, str] = {"model": "#dbeafe", "tool": "#dcfce7", "ending": "#f3f4f6"}


@dataclass(kw_only=True)
class Drawing:
    """Boxes and arrows."""

    title: str
    nodes: dict[str, Kind] = field(default_factory=dict)
    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    """Label by (from, to); empty: none."""

    def mermaid(self) -> str:
        """A Mermaid flowchart, as GitHub and notebooks show it."""
        shapes = {"model": ("[", "]"), "tool": ("[[", "]]"), "ending": ("([", "])")}
        lines = ["flowchart TD"]
        lines += [
            f'  {_id(n)}{shapes[kind][0]}"{_quoted(_title(n))}"{shapes[kind][1]}' for n, kind in self.nodes.items()
        ]
        for (one, other), label in self.edges.items():
            arrow = f'-- "{_quoted(label)}" -->' if label else "-->"
            lines.append(f"  {_id(one)} {arrow} {_id(other)}")
        return "\n".join(lines) + "\n"

    def svg(self) -> str:
        """The same as a picture that needs nothing else."""
        rows = _rows(self.nodes, self.edges)
        width = max(len(row) for row in rows) * (BOX_WIDTH + GAP_X) - GAP_X + 2 * (MARGIN + SIDE)
        height = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
        place: dict[str, tuple[float, float]] = {}
        for level, row in enumerate(rows):
            left = (width - (len(row) * (BOX_WIDTH + GAP_X) - GAP_X)) / 2
            for column, name in enumerate(row):
                place[name] = (left + column * (BOX_WIDTH + GAP_X), MARGIN + level * (BOX_HEIGHT + GAP_Y))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            f'font-family="sans-serif" font-size="13" role="img" aria-label="{escape(self.title, quote=True)}">',
            f"<title>{escape(self.title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#6b7280"/></marker></defs>',
        ]
        parts += [_arrow(place, one, other, label, width) for (one, other), label in self.edges.items()]
        for name, (x, y) in place.items():
            kind = self.nodes[name]
            radius = {"model": 6, "tool": 0, "ending": 20}[kind]
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{radius}" fill="{COLORS[kind]}" '
                f'stroke="#6b7280"/><text x="{x + BOX_WIDTH / 2:g}" y="{y + BOX_HEIGHT / 2 + 4:g}" '
                f'text-anchor="middle">{escape(_short(_title(name), 20))}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"


def draw_graph(graph: Graph, *, title: str) -> Drawing:
    """A declared graph, from the task to the answer."""
    drawing = Drawing(title=title)
    drawing.nodes[TASK] = "ending"
    for name, node in graph.nodes.items():
        drawing.nodes[name] = node.type
    drawing.nodes[ANSWER] = "ending"
    for name in graph.start:
        drawing.edges[TASK, name] = ""
    for edge in graph.edges:
        when = edge.when.text if edge.when else ""
        known = drawing.edges.get((edge.source, edge.target))
        drawing.edges[edge.source, edge.target] = (
            f"{known} or {when}" if known and when else when if known is None else ""
        )
    for name in graph.nodes:
        if name in graph.end:
            drawing.edges[name, ANSWER] = ""
    return drawing


def draw_traces(traces: Iterable[Trace], *, title: str) -> Drawing:
    """What recorded episodes did: an arrow's label says in how many of the reader's calls it read from there."""
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
    for (one, other), count in reads.items():
        share = count / calls[other]
        drawing.edges[one, other] = "" if share == 1 else f"{share:.0%}"
    return drawing


def _rows(nodes: Mapping[str, Kind], edges: Mapping[tuple[str, str], str]) -> list[list[str]]:
    """Boxes by row: below all that they are reached from, but for what leads back."""
    order = {name: i for i, name in enumerate(nodes)}
    depth = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for one, other in edges:
            if order[one] < order[other]:
                depth[other] = max(depth[other], depth[one] + 1)
    if ANSWER in depth:
        depth[ANSWER] = max(depth.values()) if max(depth.values()) == depth[ANSWER] else max(depth.values()) + 1
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in nodes:
        rows[depth[name]].append(name)
    return rows


def _arrow(place: Mapping[str, tuple[float, float]], one: str, other: str, label: str, width: float) -> str:
    """Straight down to the next row; past other rows along the left side, back up along the right one."""
    (x1, y1), (x2, y2) = place[one], place[other]
    if 0 < y2 - y1 <= BOX_HEIGHT + GAP_Y:
        (ax, ay), (bx, by) = (x1 + BOX_WIDTH / 2, y1 + BOX_HEIGHT), (x2 + BOX_WIDTH / 2, y2)
        path = f"M{ax:g} {ay:g}C{ax:g} {(ay + by) / 2:g} {bx:g} {(ay + by) / 2:g} {bx:g} {by:g}"
        at, anchor = (bx, by - 14), "middle"
    else:
        is_down = y2 > y1
        ax, bx = (x1, x2) if is_down else (x1 + BOX_WIDTH, x2 + BOX_WIDTH)
        ay, by = y1 + BOX_HEIGHT / 2, y2 + BOX_HEIGHT / 2
        edge = min(x for x, _ in place.values()) if is_down else max(x for x, _ in place.values()) + BOX_WIDTH
        outermost = edge - GAP_X / 2 if is_down else edge + GAP_X / 2
        side = (8 * outermost - ax - bx) / 6  # of a cubic curve, whose middle lies 3/4 of the way to its control points
        path = f"M{ax:g} {ay:g}C{side:g} {ay:g} {side:g} {by:g} {bx:g} {by:g}"
        at, anchor = (outermost, (ay + by) / 2), "end" if is_down else "start"
    line = f'<path d="{path}" fill="none" stroke="#6b7280" marker-end="url(#arrow)"/>'
    if not label:
        return line
    given = f'x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" font-size="10"'
    text = escape(_short(label, 28))
    halo = f'<text {given} fill="white" stroke="white" stroke-width="4">{text}</text>'
    return f'{line}{halo}<text {given} fill="#374151">{text}</text>'


def _title(name: str) -> str:
    return name.strip("()")


def _id(name: str) -> str:
    return ("e_" if name in (TASK, ANSWER) else "n_") + re.sub(r"\W", "_", _title(name))


def _quoted(text: str) -> str:
    return text.replace('"', "#quot;").replace("\n", " ")


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
