"""declared: a graph from YAML (`serve_apps/extensions/graphs/graph.py`) -> a workflow. Every model or choice node is an agent of its name.

start nodes -> ready nodes, all at once -> their values open edges -> ... -> an end node, or max_steps
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import Agent, Tool, ToolError, traced
from serve_apps.authoring.choices import OFFERED
from serve_apps.authoring.workflow import Outcome, Workflow, together
from serve_apps.episode.causes import CallTimeout
from serve_apps.extensions.graphs.expressions import look_up
from serve_apps.extensions.graphs.graph import STOP, Graph, load_graph
from serve_apps.extensions.graphs.graph_spec import NodeSpec
from serve_apps.extensions.graphs.templates import FIELD, as_prompt, as_text, fields_of, fill, input_name
from stores.by_name import open_by_name
from stores.extensions import extensions
from stores.types import Task


class Declared(Workflow):
    """Runs a node when an edge to it has opened and no other running or waiting node can still open one, so that branches
    join without a count of those that were taken. An edge to a node that has no visits left does not open. A choice node leads to the
    node that it chooses; `stop` ends the episode.
    """

    def __init__(self, graph: str, tools: dict[str, dict[str, Any]] | None = None) -> None:
        """Sets the workflow up.

        Args:
            graph: YAML file.
            tools: by name: `{path: "module:name", ...}` of a `Tool`, or of what makes one from the further keys; or what an
                extension makes of a key of its own, such as `{retriever: {...}, top_k: 5}`.
        """
        self.graph = load_graph(graph)
        self.agents = {
            name: Agent(
                prompt=as_prompt(node.prompt),
                system=as_prompt(node.system),
                contract=node.contract(),
                max_tokens=node.max_tokens,
                cut=tuple(input_name(field) for field in node.cut),
            )
            for name, node in self.graph.nodes.items()
            if node.is_agent
        }
        self.tools = {name: _tool(name, settings) for name, settings in (tools or {}).items()}
        for name, node in self.graph.nodes.items():
            if node.type == "tool" and node.tool not in self.tools:
                raise TypeError(f"{graph}: node {name} calls tool {node.tool!r}: name it in workflow.settings.tools")

    @property
    def prompts(self) -> dict[str, str]:
        """The prompts of the agents, and the file: its edges and conditions are part of the team's identity."""
        return {**super().prompts, "graph": self.graph.text}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the template `answer`, filled with the nodes' values.

        Metadata: `failed_nodes`, those that failed open.
        """
        episode = _Walk(self.graph, task)
        try:
            await episode.go(agents, tools)
        finally:
            await episode.cancel()
        return Outcome(
            answer=fill(self.graph.answer, episode.values),
            stop_reason=episode.stop_reason,
            is_truncated=episode.stop_reason == "max_steps",
            metadata={"failed_nodes": episode.failed} if episode.failed else {},
        )


class _Walk:
    """Runs one episode through a graph."""

    def __init__(self, graph: Graph, task: Task) -> None:
        self._graph = graph
        self.values: dict[str, Any] = {"question": task.prompt, "step": 0}
        self.stop_reason = "no_edge"
        self._waiting: list[str] = list(graph.start)
        self._running: dict[asyncio.Task[None], str] = {}
        self._visits: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    async def go(self, agents: Any, tools: Any) -> None:
        """Runs nodes until an end node is done, no node is left, or the steps are used up; nodes that run then may end."""
        while self._waiting or self._running:
            for name in self._ready():
                if self.values["step"] >= self._graph.max_steps:
                    self.stop_reason = "max_steps"
                    self._waiting.clear()
                    break
                self.values["step"] += 1
                self._waiting.remove(name)
                self._visits[name] += 1
                self._running[asyncio.create_task(self._visit(name, agents, tools))] = name
            if not self._running:
                return
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._running if task in done]:
                name = self._running.pop(task)
                task.result()
                if self._graph.nodes[name].type == "choice" and self.values[name]["choice"] == STOP:
                    self.stop_reason = STOP
                    return
                if name in self._graph.end:
                    self.stop_reason = "finished"
                    if self._graph.stop_on_end:
                        return
                if self.stop_reason != "max_steps":
                    self._open_edges(name)

    async def cancel(self) -> None:
        """Cancels the nodes that are still running."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ready(self) -> list[str]:
        """Returns the waiting nodes that no other running or waiting node can still reach."""
        active = {*self._running.values(), *self._waiting}
        return [
            name
            for name in dict.fromkeys(self._waiting)
            if name not in self._running.values()
            and not any(name in self._graph.reaches[other] for other in active if other != name)
        ]

    def _open_edges(self, name: str) -> None:
        for edge in self._graph.leaving(name):
            has_visits = self._has_visits(edge.target)
            if has_visits and edge.target not in self._waiting and (edge.when is None or edge.when(self.values)):
                self._waiting.append(edge.target)

    def _has_visits(self, name: str) -> bool:
        return self._visits[name] < (self._graph.nodes[name].max_visits or 1)

    async def _visit(self, name: str, agents: Any, tools: Any) -> None:
        node = self._graph.nodes[name]
        try:
            async with asyncio.timeout(node.timeout_s):
                self.values[name] = await self._act(name, node, agents, tools)
            return
        except TimeoutError:
            late = f"node {name}: no answer after {node.timeout_s:g} s"
            fault: Exception = CallTimeout(late) if node.is_agent else TimeoutError(late)
        except ToolError as error:
            fault = type(error)(f"node {name}: {error}")
        if not node.fail_open:
            raise fault
        self.failed[name] = str(fault)
        self.values[name] = dict.fromkeys((*node.contract().field_names, "text"), "") if node.is_agent else ""

    async def _act(self, name: str, node: NodeSpec, agents: Any, tools: Any) -> Any:
        if node.type == "tool":
            arguments = {key: self._argument(text) for key, text in node.arguments.items()}
            if not node.each:
                return await tools[node.tool](**arguments)
            items = arguments[node.each] if isinstance(arguments[node.each], (list, tuple)) else [arguments[node.each]]
            return await together(*(tools[node.tool](**{**arguments, node.each: item}) for item in items))
        fields = [f for f in (*fields_of(node.prompt), *fields_of(node.system)) if f != OFFERED]
        inputs: dict[str, Any] = {input_name(f): as_text(look_up(f, self.values)) for f in fields}
        if node.type == "choice":
            offered = [option for option in node.options if option == STOP or self._has_visits(option)]
            if not offered or (len(offered) == 1 and offered[0] not in node.messages):
                return dict.fromkeys(("message", "text"), "") | {"choice": offered[0] if offered else ""}
            inputs[OFFERED] = offered
        reply = await agents[name](**inputs)
        return {"text": reply.text, **reply.fields, **traced(reply.data, reply.turn_index)}

    def _argument(self, template: str) -> Any:
        match = FIELD.fullmatch(template)
        return look_up(match[1], self.values) if match else fill(template, self.values)


def _tool(name: str, settings: Mapping[str, Any]) -> Tool:
    place = f"workflow.settings.tools.{name}"
    if "path" in settings:  # first: a maker of the author's own may take keys that extensions have, too
        declared = open_by_name(str(settings["path"]), place=f"{place}.path")
        more = {key: value for key, value in settings.items() if key != "path"}
        try:
            made = declared if isinstance(declared, Tool) and not more else declared(**more)
        except TypeError as error:
            raise TypeError(f"{place}: {settings['path']!r} makes no Tool of {sorted(more)}: {error}") from None
        if not isinstance(made, Tool):
            raise TypeError(f"{place}.path: {settings['path']!r} is no Tool, and makes none")
        return made
    kinds = {key: path for extension in extensions() for key, path in extension.tools.items()}
    kind = next((key for key in kinds if key in settings), "")
    if not kind:
        raise TypeError(f"{place}: give {''.join(f'`{key}`, ' for key in sorted(kinds))}or `path` of a tool")
    try:
        made = open_by_name(kinds[kind], place=f"{place}.{kind}")(name, settings)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from None
    return made
