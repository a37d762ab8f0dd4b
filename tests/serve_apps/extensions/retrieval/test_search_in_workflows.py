"""Search as a tool of workflows: documents in prompts, a retriever that fails, the shipped graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines.examples.made_up_facts import tasks as made_up_facts
from serve_apps.extensions.graphs.declared import Declared
from serve_apps.extensions.paper_workflows.single_agent import SingleAgent
from stores.traces.corpus import build_corpus
from stores.types import EpisodeStatus, Task
from tests.serve_apps.plays import agents_of, play

pytestmark = pytest.mark.fast

GRAPHS = sorted((Path(__file__).parents[4] / "infra" / "graphs").glob("*.yaml"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "d.jsonl").write_text(
        '{"id": "1", "title": "Mira", "text": "Mira lives in Tarn."}\n{"id": "2", "title": "Tarn", "text": "Tarn lies in Velland."}\n'
    )
    build_corpus(str(folder / "index"), folder / "d.jsonl")
    return {"retrieve": {"retriever": {"corpus": str(folder / "index")}, "top_k": 1}}


MIRA = Task(task_id="q", prompt="Where does Mira live?", answers=("Tarn",))


QUESTION = Task(task_id="q", prompt="In which country does Mira live?", answers=("Velland",))
SAYS = {
    "decomposer": json.dumps({"queries": ["Mira", "Tarn"]}),
    "rewriter": "<search>Tarn</search>",
    "summarizer": "<summary>Tarn lies in Velland</summary>",
    "selector": "<document>Tarn lies in Velland.</document>",
    "evidence_1": "<evidence>Mira: Tarn</evidence>",
    "evidence_2": "<evidence>Tarn: Velland</evidence>",
    "answerer": "<answer>Velland</answer>",
}


@pytest.mark.parametrize(
    ("name", "spoke"),
    [
        ("decompose_answer", ["decomposer", "retrieve", "answerer"]),
        (
            "decompose_evidence",
            ["decomposer", "retrieve", "retrieve", "evidence_1", "evidence_2", "answerer"],
        ),
        ("decompose_summarize", ["decomposer", "retrieve", "summarizer", "answerer"]),
        ("rewrite_select", ["rewriter", "retrieve", "selector", "answerer"]),
    ],
)
def test_the_shipped_graphs_answer(name: str, spoke: list[str], tools: dict[str, Any]) -> None:
    path = next(p for p in GRAPHS if p.stem == name)
    trace = play(Declared(str(path), tools), QUESTION, lambda agent, n, _: SAYS[agent])
    assert (trace.error, trace.answer, trace.stop_reason) == ("", "Velland", "finished")
    assert sorted(agents_of(trace)) == sorted(spoke)
    assert agents_of(trace)[-1] == "answerer"
    final = trace.turns[-1].prompt_text
    assert "Tarn" in final and "{" not in final
    before = {e: name for e, name in enumerate(agents_of(trace))}
    read = {before[i] for i in trace.turns[-1].parents}
    assert read and read <= {"retrieve", "summarizer", "selector", "evidence_1", "evidence_2"}
    assert len(GRAPHS) == 4


def test_a_branch_that_is_not_taken_is_not_waited_for(tools: dict[str, Any]) -> None:
    path = next(p for p in GRAPHS if p.stem == "decompose_answer")
    says = SAYS | {"decomposer": "no JSON"}
    trace = play(Declared(str(path), tools), QUESTION, lambda agent, n, _: says[agent])
    assert agents_of(trace) == ["decomposer", "answerer"]
    assert [t.is_format_ok for t in trace.turns] == [False, True]


def test_a_retriever_that_fails_is_in_the_trace_and_the_episode_goes_on() -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<search>Mira</search>" if not n else "<answer>unkown</answer>"

    workflow = SingleAgent(retriever={"urls": ["http://127.0.0.1:9/retrieve"], "max_attempts": 2})
    trace = play(workflow, MIRA, say)
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "unkown")
    assert "ConnectError" in trace.tool_calls[0].error and trace.tool_calls[0].num_attempts == 2
    assert "Found: <information></information>" in trace.turns[1].prompt_text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"corpus": "a", "urls": ["b"]},
        {"urls": ["http://a/b"], "retries": 3},
        {"urls": ["http://a/b"], "timeout_s": "5"},
        {"urls": ["http://a/b"], "max_attempts": 0},
    ],
)
def test_a_retriever_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"workflow\.settings\.retriever(: give|: unknown|\.timeout_s|\.max_attempts)"):
        SingleAgent(retriever=settings)


def test_documents_from_a_function_are_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    settings = {"documents": "pipelines.examples.made_up_facts.tasks:documents", "num_people": 50}
    (task,) = made_up_facts.generate(seed=0, split="train", count=1, hops="one", num_people=50)
    trace = play(
        SingleAgent(retriever=settings),
        task,
        lambda agent, n, _: f"<answer>{task.answers[0]}</answer>" if n else f"<search>{task.prompt}</search>",
    )
    assert task.answers[0] in trace.turns[1].prompt_text
    (built,) = (tmp_path / "corpora").iterdir()
    before = built.stat().st_mtime_ns
    SingleAgent(retriever=settings)
    assert built.stat().st_mtime_ns == before


def documents_of(path: str) -> Iterator[dict[str, str]]:
    yield {"id": "1", "title": "Mira", "text": Path(path).read_text()}


def test_other_documents_of_the_same_function_are_indexed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    facts = tmp_path / "facts.txt"
    for place in ("Tarn", "Velland"):
        facts.write_text(f"Mira lives in {place}.")
        workflow = SingleAgent(retriever={"documents": f"{__name__}:documents_of", "path": str(facts)})
        said = ["<search>Mira</search>", "<answer>x</answer>"]
        trace = play(workflow, MIRA, lambda agent, n, _, said=said: said[n])
        assert f"Mira lives in {place}." in trace.turns[1].prompt_text
