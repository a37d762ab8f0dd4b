"""Pictures of workflows: declared ones as written, recorded ones as played."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipelines.report.draw import ANSWER, TASK, Drawing, draw_graph, draw_traces
from serve_apps.graph import load_graph
from stores.types import Trace

GRAPHS = Path(__file__).parents[3] / "infra" / "graphs"


def texts(drawing: Drawing) -> list[str]:
    tree = ElementTree.fromstring(drawing.svg())
    return [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_a_declared_graph_is_drawn_as_it_is_written() -> None:
    drawing = draw_graph(load_graph(GRAPHS / "decompose_answer.yaml"), title="qa <graph>")
    assert list(drawing.nodes) == [TASK, "decomposer", "retrieve", "answerer", ANSWER]
    assert drawing.edges["decomposer", "retrieve"] == 'decomposer.queries != ""'
    mermaid = drawing.mermaid()
    assert 'n_decomposer -- "decomposer.queries != #quot;#quot;" --> n_retrieve' in mermaid
    assert 'n_retrieve[["retrieve"]]' in mermaid
    assert {"task", "decomposer", "retrieve", "answerer", "answer"} <= set(texts(drawing))
    assert "<title>qa &lt;graph&gt;</title>" in drawing.svg()


def test_boxes_do_not_lie_on_each_other() -> None:
    for path in GRAPHS.glob("*.yaml"):
        tree = ElementTree.fromstring(draw_graph(load_graph(path), title="t").svg())
        boxes = [
            (float(r.attrib["x"]), float(r.attrib["y"]))
            for r in tree.iter("{http://www.w3.org/2000/svg}rect")
            if "x" in r.attrib
        ]
        assert len(boxes) == len(set(boxes)) == len(load_graph(path).nodes) + 2
        width = float(tree.attrib["width"])
        assert all(0 <= x <= width - 150 for x, _ in boxes)


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
    assert draw_traces([], title="t").svg().startswith("<svg")


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
