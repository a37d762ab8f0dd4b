"""graph: a workflow declared in YAML -> checked nodes and edges. Errors name the node and the line.

nodes:
  decompose: {type: model, prompt: "... {question}", parser: {json: [queries]}}
  retrieve:  {type: tool, tool: retrieve, arguments: {queries: "{decompose.queries}"}, timeout_s: 30, fail_open: true}
  answer:    {type: model, prompt: "... {retrieve}", parser: {tags: [answer]}, max_visits: 2}
edges:
  - {from: decompose, to: retrieve, when: decompose.queries != ""}
start: [decompose]
end: [answer]
answer: "{answer.answer}"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_apps.authoring.choices import OFFERED
from serve_apps.authoring.yaml_text import read_yaml
from serve_apps.extensions.graphs.expressions import Expression, parse_expression
from serve_apps.extensions.graphs.graph_spec import NAME, GraphSpec, NodeSpec, ParserSpec
from serve_apps.extensions.graphs.templates import fields_of, stray_brace

BUILT_IN = frozenset({"question", "step"})
"""Names that templates and conditions read without a node."""
STOP = "stop"
"""The option of a choice node that ends the episode."""
TAKEN = BUILT_IN | {STOP, OFFERED} | {"true", "false", "null", "and", "or", "not", "in"}
"""Names that no node may have: conditions and templates use them for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Connects two nodes of a checked graph."""

    source: str
    target: str
    when: Expression | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Holds a declared workflow that has been checked."""

    nodes: Mapping[str, NodeSpec]
    edges: tuple[Edge, ...]
    start: tuple[str, ...]
    end: frozenset[str]
    answer: str
    max_steps: int
    stop_on_end: bool
    text: str
    """The text of the file."""
    reaches: Mapping[str, frozenset[str]]
    """By node, the nodes that wait for it: those that can be reached from it, within a cycle without an edge that closes one."""

    def leaving(self, node: str) -> list[Edge]:
        """Returns the edges out of a node, in the order of the file."""
        return [edge for edge in self.edges if edge.source == node]


def load_graph(path: str | Path) -> Graph:
    """Reads and checks a graph; ValueError names file, line, node and what to change."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"graph {path} does not exist (seen from {Path.cwd()})")
    text = path.read_text(encoding="utf-8")
    data = read_yaml(text, str(path))
    return check_graph(data, place=str(path), lines=_lines(yaml.compose(text, yaml.SafeLoader)), text=text)


def check_graph(
    data: Any, *, place: str, lines: Mapping[tuple[str | int, ...], int] | None = None, text: str = ""
) -> Graph:
    """Checks a graph in plain data; `lines` maps paths in it to lines of the file, whose text is `text`."""
    at = _Places(place, lines or {})
    try:
        spec = GraphSpec.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(p for p in first["loc"] if not str(p).startswith("function-"))
        raise ValueError(f"{at(*where)}: {'.'.join(map(str, where))}: {first['msg'].lower()}") from None
    names = set(spec.nodes)
    for name, node in spec.nodes.items():
        _check_name(name, at)
        try:
            node.contract()
        except ValueError as error:
            key = "options" if node.type == "choice" else "parser"
            raise ValueError(f"{at('nodes', name, key)}: node {name}: {error}") from None
    for section in ("start", "end"):
        for i, name in enumerate(getattr(spec, section)):
            _known(name, names, at(section, i), f"{section} names")
    edges = []
    for i, edge in enumerate(spec.edges):
        _known(edge.source, names, at("edges", i, "from"), "an edge comes from")
        _known(edge.target, names, at("edges", i, "to"), "an edge leads to")
        try:
            when = parse_expression(edge.when) if edge.when else None
        except ValueError as error:
            raise ValueError(f"{at('edges', i, 'when')}: edge {edge.source} -> {edge.target}: {error}") from None
        edges.append(Edge(source=edge.source, target=edge.target, when=when))
        for name in when.names if when else ():
            _known_field(name, spec, at("edges", i, "when"), f"edge {edge.source} -> {edge.target}")
    for name, node in spec.nodes.items():
        _check_node(name, node, spec, at)
        for option in node.options:
            if option != STOP:
                when = parse_expression(f'{name}.choice == "{option}"')
                edges.append(Edge(source=name, target=option, when=when))
    _check_template(spec.answer, spec, at("answer"), "answer")
    reaches = _reachability(names, edges)
    _check_shape(spec, edges, reaches, at)
    return Graph(
        nodes=spec.nodes,
        edges=tuple(edges),
        start=spec.start,
        end=frozenset(spec.end),
        answer=spec.answer,
        max_steps=spec.max_steps,
        stop_on_end=spec.stop_on_end,
        text=text,
        reaches=_waited_for(reaches, _reachability(names, _forward(spec.start, edges))),
    )


class _Places:
    """Maps a path in the data to the file and line where it stands."""

    def __init__(self, place: str, lines: Mapping[tuple[str | int, ...], int]) -> None:
        self._place, self._lines = place, lines

    def __call__(self, *path: str | int) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return f"{self._place}:{self._lines[path[:length]]}"
        return self._place


def _lines(node: yaml.Node | None, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], int]:
    lines: dict[tuple[str | int, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*path, key.value)] = key.start_mark.line + 1
            lines |= _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*path, i)] = value.start_mark.line + 1
            lines |= _lines(value, (*path, i))
    return lines


def _known(name: str, names: set[str], at: str, what: str) -> None:
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"
        raise ValueError(f"{at}: {what} {name!r}, which is no node: {hint}")


def _known_field(name: str, spec: GraphSpec, at: str, what: str) -> None:
    """Checks a name in a template or condition: `question`, `step`, a tool node, or a field of a model node's contract."""
    node, _, field = name.partition(".")
    if name in BUILT_IN:
        return
    if node not in spec.nodes:
        raise ValueError(f"{at}: {what} reads {name!r}: no node {node!r}; there are {', '.join(sorted(spec.nodes))}")
    written = spec.nodes[node]
    if written.type == "tool":
        return
    known = (*written.contract().field_names, "text")
    if not field:
        raise ValueError(f"{at}: {what} reads {name!r}: say which of its fields, {name}.{known[0]} for example")
    if field.partition(".")[0] not in known:
        raise ValueError(f"{at}: {what} reads {name!r}: {node} has the fields {', '.join(dict.fromkeys(known))}")


def _check_template(template: str, spec: GraphSpec, at: str, what: str) -> None:
    for name in fields_of(template):
        _known_field(name, spec, at, what)
    stray = stray_brace(template)
    if stray:
        raise ValueError(
            f"{at}: {what}: {stray!r} is no field: fields are {{node.field}} or {{node.field.0}}; a brace is written twice"
        )


def _check_name(name: str, at: _Places) -> None:
    if not NAME.fullmatch(name) or name in TAKEN or "__" in name:
        raise ValueError(
            f"{at('nodes', name)}: node {name!r}: letters, digits and single _ make a name, and {', '.join(sorted(TAKEN))} "
            "are taken"
        )


def _check_node(name: str, node: NodeSpec, spec: GraphSpec, at: _Places) -> None:
    if node.is_agent and not node.prompt:
        raise ValueError(f"{at('nodes', name)}: node {name}: a {node.type} node needs a `prompt`")
    if node.type == "choice" and OFFERED not in fields_of(node.prompt):
        raise ValueError(
            f"{at('nodes', name, 'prompt')}: node {name}: {{{OFFERED}}} is missing, where a choice lists what is offered"
        )
    if node.type == "choice" and (node.tool or node.arguments or node.parser != ParserSpec()):
        raise ValueError(f"{at('nodes', name)}: node {name}: a choice node has no `tool`, `arguments` or `parser`")
    if node.type == "choice" and OFFERED in node.cut:
        raise ValueError(f"{at('nodes', name, 'cut')}: node {name}: what is offered must not be cut")
    if node.type != "choice" and (node.options or node.messages):
        raise ValueError(f"{at('nodes', name)}: node {name}: `options` and `messages` are for choice nodes")
    for option in node.options:
        if option != STOP:
            _known(option, set(spec.nodes), at("nodes", name, "options", option), f"node {name} offers")
    if node.type == "tool" and not node.tool:
        raise ValueError(f"{at('nodes', name)}: node {name}: a tool node needs a `tool`")
    if node.each and node.each not in node.arguments:
        raise ValueError(f"{at('nodes', name, 'each')}: node {name}: each: {node.each!r} is none of its arguments")
    templates = {
        "prompt": node.prompt,
        "system": node.system,
        **{f"arguments.{k}": v for k, v in node.arguments.items()},
    }
    for key, template in templates.items():
        if node.type == "choice":
            template = template.replace(f"{{{OFFERED}}}", "")
        _check_template(template, spec, at("nodes", name, *key.split(".")), f"node {name}, {key}")
    read = [*fields_of(node.prompt), *fields_of(node.system)]
    for field in node.cut:
        if field not in read:
            raise ValueError(
                f"{at('nodes', name, 'cut')}: node {name}: cut: {field!r} is not read by it: {', '.join(read)}"
            )


def _reachability(names: set[str], edges: Sequence[Edge]) -> dict[str, frozenset[str]]:
    after: dict[str, set[str]] = {name: {e.target for e in edges if e.source == name} for name in names}
    reaches = {}
    for name in names:
        reached: set[str] = set()
        todo = list(after[name])
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += after[node]
        reaches[name] = frozenset(reached)
    return reaches


def _waited_for(
    every: Mapping[str, frozenset[str]], forward: Mapping[str, frozenset[str]]
) -> dict[str, frozenset[str]]:
    """Returns by node what waits for it: nodes of one cycle wait for each other only along its forward edges, or nothing would run."""
    return {
        name: forward[name] | {other for other in reached if name not in every[other]}
        for name, reached in every.items()
    }


def _forward(start: Sequence[str], edges: Sequence[Edge]) -> list[Edge]:
    """Returns the edges without those that lead back into a path from the start: the rest has no cycle."""
    back: set[int] = set()
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        for i, edge in enumerate(edges):
            if edge.source != node:
                continue
            if edge.target in (*path, node):
                back.add(i)
            elif edge.target not in done:
                visit(edge.target, (*path, node))
        done.add(node)

    for node in start:
        if node not in done:
            visit(node, ())
    return [edge for i, edge in enumerate(edges) if i not in back]


def _check_shape(spec: GraphSpec, edges: Sequence[Edge], reaches: Mapping[str, frozenset[str]], at: _Places) -> None:
    ends = set(spec.end) | {node for node, of in spec.nodes.items() if STOP in of.options}
    if not ends:
        raise ValueError(
            f"{at('end')}: nothing ends the episode: name nodes in `end`, or let a choice node offer `{STOP}`"
        )
    from_start = set(spec.start).union(*(reaches[name] for name in spec.start))
    for name in spec.nodes:
        if name not in from_start:
            raise ValueError(
                f"{at('nodes', name)}: node {name} cannot be reached from {', '.join(spec.start)}: add an edge to it, "
                "or drop it"
            )
        if name not in ends and not reaches[name] & ends:
            raise ValueError(
                f"{at('nodes', name)}: no edge leads from node {name} to an end ({', '.join(sorted(ends))})"
            )
    unbounded = {name for name, node in spec.nodes.items() if node.max_visits is None}
    inner = _reachability(unbounded, [e for e in edges if e.source in unbounded and e.target in unbounded])
    for name in spec.nodes:
        if name in unbounded and name in inner[name]:
            circle = sorted(n for n in inner[name] if name in inner[n])
            raise ValueError(
                f"{at('nodes', name)}: a cycle without bound: {', '.join(circle)}: give one of them `max_visits`"
            )
