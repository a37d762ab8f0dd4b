"""Flowcharts of workflows: declared ones as written, recorded ones as they went."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.extensions.graph.draw import ANSWER, TASK, draw_graph, draw_traces
from serve_apps.extensions.graphs.graph import load_graph
from stores.types import Trace

pytestmark = pytest.mark.fast

GRAPHS = Path(__file__).parents[4] / "infra" / "graphs"


def test_a_declared_graph_is_drawn_as_it_is_written() -> None:
    drawing = draw_graph(load_graph(GRAPHS / "decompose_answer.yaml"), title='qa: a "graph"')
    assert list(drawing.nodes) == [TASK, "decomposer", "retrieve", "answerer", ANSWER]
    assert drawing.edges["decomposer", "retrieve"] == 'decomposer.queries != ""'
    mermaid = drawing.mermaid()
    assert 'n_decomposer -- "decomposer.queries != #quot;#quot;" --> n_retrieve' in mermaid
    assert 'n_retrieve[["retrieve"]]' in mermaid
    assert mermaid.startswith('---\ntitle: "qa: a \\"graph\\""\n---\ngraph LR\n')


@pytest.mark.parametrize("path", sorted(GRAPHS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_text_has_a_line_per_node_and_edge_and_no_unknown_ends(path: Path) -> None:
    drawing = draw_graph(load_graph(path), title="t")
    lines = drawing.mermaid().splitlines()[4:]
    nodes = [re.match(r"  (\w+)[\[(]", line) for line in lines[: len(drawing.nodes)]]
    edges = [re.fullmatch(r'  (\w+) (?:-- ".*" )?--> (\w+)', line) for line in lines[len(nodes) :]]
    ids = {node[1] for node in nodes if node}
    assert len(ids) == len(drawing.nodes) == len(load_graph(path).nodes) + 2
    assert len(edges) == len(drawing.edges) and all(edge and {edge[1], edge[2]} <= ids for edge in edges)


def test_episodes_are_drawn_as_they_went(make_trace: Callable[..., Trace]) -> None:
    whole = make_trace(0)
    early = replace(make_trace(1), turns=whole.turns[:1], tool_calls=())
    drawing = draw_traces([whole, whole, whole, early], title="t")
    assert drawing.nodes == {
        TASK: "ending",
        "solver": "model",
        "search": "tool",
        "verifier": "model",
        ANSWER: "ending",
    }
    assert drawing.edges[TASK, "solver"] == ""
    assert drawing.edges["solver", "search"] == ""
    assert drawing.edges["verifier", ANSWER] == "75%"
    assert drawing.edges["solver", ANSWER] == "25%"
    assert list(draw_traces([], title="t").nodes) == [TASK, ANSWER]


def test_a_node_called_answer_is_not_the_end(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        "nodes:\n  task: {type: model, prompt: x}\n  answer: {type: model, prompt: '{task.text}'}\n"
        "edges:\n  - {from: task, to: answer, when: task.text == '1'}\n  - {from: task, to: answer, when: step == 2}\n"
        "start: [task]\nend: [answer]\nanswer: '{answer.text}'\n"
    )
    drawing = draw_graph(load_graph(path), title="t")
    assert (drawing.nodes["answer"], drawing.nodes[ANSWER]) == ("model", "ending")
    assert drawing.edges["task", "answer"] == "task.text == '1' or step == 2"
    assert 'n_answer["answer"]' in drawing.mermaid() and 'e_answer(["answer"])' in drawing.mermaid()
