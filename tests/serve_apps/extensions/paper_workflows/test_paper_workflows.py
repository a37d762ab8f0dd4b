"""Workflows of papers, played by scripted agents: who speaks when, what reaches whose prompt, when it stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from serve_apps.authoring.agent import Reply, TracedText
from serve_apps.extensions.paper_workflows.debate import HIDDEN, Debate, without_answer
from serve_apps.extensions.paper_workflows.hierarchical_search import HierarchicalSearch
from serve_apps.extensions.paper_workflows.iterative_search import IterativeSearch, Plan
from serve_apps.extensions.paper_workflows.pioneer_observer import PioneerObserver
from serve_apps.extensions.paper_workflows.single_agent import SingleAgent
from serve_apps.extensions.paper_workflows.solver_verifier import SolverVerifier
from stores.traces.corpus import build_corpus
from stores.types import EpisodeStatus, Task
from tests.serve_apps.plays import agents_of, play

pytestmark = pytest.mark.fast


SUM = Task(task_id="t", prompt="2+3", answers=("5",))


def solution(answer: str, steps: str = "steps") -> str:
    return f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>"


def test_debaters_do_not_read_each_others_answers_and_vote() -> None:
    answers = {"debater_0": ["7", "8"], "debater_1": ["9", "8"], "debater_2": ["9", "6"]}
    trace = play(
        Debate(num_agents=3, num_rounds=2),
        SUM,
        lambda agent, n, _: solution(answers[agent][n], steps=f"{agent} says it is {answers[agent][n]}"),
    )
    assert (trace.answer, trace.stop_reason, trace.outcome_metadata) == ("8", "last_round", {"votes": {"8": 2, "6": 1}})
    second = next(t for t in trace.turns if t.agent == "debater_0" and t.round_index == 1)
    assert f"debater_1 says it is {HIDDEN}" in second.prompt_text
    assert "9" not in second.prompt_text
    assert "debater_0 says it is 7" in second.prompt_text
    assert second.parents == (0, 1, 2)


@pytest.mark.parametrize(
    ("steps", "answer", "shown"),
    [
        ("15+25=40; 40/8=5", "5", f"15+25=40; 40/8={HIDDEN}"),
        ("x is 5.", "5", f"x is {HIDDEN}."),
        ("0.5 and 5.5", "5", "0.5 and 5.5"),
        (r"so \boxed{\frac{1}{2}}", "", f"so {HIDDEN}"),
        (r"\boxed{7} at first", "8", f"{HIDDEN} at first"),
        (r"it is \boxed{7} or \boxed{9}", "7, 9", f"it is {HIDDEN} or {HIDDEN}"),
    ],
)
def test_what_peers_read_of_a_solution(steps: str, answer: str, shown: str) -> None:
    fields = {"solution": TracedText.by(steps, 3), "answer": TracedText.by(answer, 3)}
    reply = Reply(turn_index=3, text=TracedText.by("", 3), fields=fields, is_format_ok=True, is_truncated=False)
    assert without_answer(reply) == shown
    assert without_answer(reply).origins == {3}


def test_a_debate_ends_where_all_agree_and_a_summarizer_may_decide() -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<ANSWER>5</ANSWER>" if agent == "summarizer" else solution("4")

    trace = play(Debate(num_agents=2, num_rounds=5, decide="summarizer"), SUM, say)
    assert agents_of(trace) == ["debater_0", "debater_1", "summarizer"]
    assert (trace.answer, trace.stop_reason) == ("5", "consensus")


APPROVES = "<CRITIQUE>fine</CRITIQUE><VERDICT>approve</VERDICT>"
REJECTS = "<CRITIQUE>add them</CRITIQUE><VERDICT>reject</VERDICT>"


@pytest.mark.parametrize(
    ("verdicts", "spoke", "reason"),
    [
        ([APPROVES], ["solver", "verifier"], "approved"),
        ([REJECTS, APPROVES], ["solver", "verifier"] * 2, "approved"),
        ([REJECTS] * 2, [*["solver", "verifier"] * 2, "solver"], "last_round"),
        (["no verdict"] * 2, [*["solver", "verifier"] * 2, "solver"], "last_round"),
    ],
)
def test_solver_and_verifier_go_on_until_approved(verdicts: list[str], spoke: list[str], reason: str) -> None:
    trace = play(
        SolverVerifier(max_rounds=3),
        SUM,
        lambda agent, n, _: rf"steps \boxed{{{n}}}" if agent == "solver" else verdicts[n],
    )
    assert (agents_of(trace), trace.stop_reason) == (spoke, reason)
    assert trace.answer == str(spoke.count("solver") - 1)
    solvers = [t for t in trace.turns if t.agent == "solver"]
    if len(solvers) > 1:
        feedback = "add them" if REJECTS in verdicts else "reject"
        assert f"Earlier answer: 0\nWhat the verifier said of it: {feedback}" in solvers[1].prompt_text
        assert set(solvers[1].parents) == ({0, 1} if REJECTS in verdicts else {0})
    assert [t.is_format_ok for t in trace.turns if t.agent == "verifier"] == ["VERDICT" in v for v in verdicts]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "d.jsonl").write_text('{"id": "1", "title": "Mira", "text": "Mira lives in Tarn."}\n')
    build_corpus(str(folder / "index"), folder / "d.jsonl")
    return {"corpus": str(folder / "index")}


QUESTION = Task(task_id="q", prompt="Where does Mira live?", answers=("Tarn",))


def test_iterative_search_carries_summaries_into_the_next_rounds(corpus: dict[str, str]) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "planner": "<plan><q1>Where is Mira?</q1><a1>unkown</a1></plan><final_answer>unkown</final_answer>",
            "answerer": "<final_answer>Tarn</final_answer>" if n else "<final_answer>unkown</final_answer>",
            "searcher": "<search>Mira</search>" if not n else "<end></end>",
            "summarizer": "<evidence>Mira lives in Tarn</evidence>",
            "updater": "<update>t1: Mira is in Tarn</update>",
        }[agent]

    trace = play(IterativeSearch(retriever=corpus), QUESTION, say)
    assert agents_of(trace) == [
        "planner", "answerer", "searcher", "retrieve", "summarizer", "updater", "answerer", "searcher",
    ]  # fmt: skip
    assert (trace.answer, trace.stop_reason) == ("Tarn", "ended")
    turns = {f"{t.agent}_{t.round_index}": t for t in trace.turns}
    assert "t1: Where is Mira? -> unkown" in turns["answerer_0"].prompt_text
    assert 'Doc 1(Title: "Mira") Mira lives in Tarn.' in turns["summarizer_0"].prompt_text
    assert "Evidence: Mira lives in Tarn" in turns["updater_0"].prompt_text
    assert "t1: Mira is in Tarn" in turns["answerer_1"].prompt_text
    assert "Found: Mira: Mira lives in Tarn" in turns["searcher_1"].prompt_text
    assert all(t.is_format_ok for t in trace.turns)
    spoke = agents_of(trace)
    read = {name: {spoke[i] for i in turn.parents} for name, turn in turns.items()}
    assert read["summarizer_0"] == {"searcher", "retrieve"}
    assert {"summarizer", "updater"} <= read["searcher_1"]
    assert read["answerer_1"] == {"updater"}
    (call,) = trace.tool_calls
    assert [spoke[i] for i in call.parents] == ["searcher"]

    # An end of the search may also end its round only: the searcher is asked in all of them.
    goes_on = play(IterativeSearch(retriever=corpus, stop_on_search_end=False), QUESTION, say)
    assert agents_of(goes_on) == [*agents_of(trace), "searcher"]
    assert (goes_on.answer, goes_on.stop_reason) == ("Tarn", "last_round")


ONE = "<q1>Where?</q1><a1>unkown</a1>"


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (ONE, ""),
        (ONE + "<q2>Who?</q2><a2>Mira</a2>", ""),
        ("anything", "not a row of"),
        (ONE + "and so on", "not a row of"),
        ("<q2>Where?</q2><a2>unkown</a2>", "numbered from 1"),
        ("".join(f"<q{i}>{i}?</q{i}><a{i}>x</a{i}>" for i in range(1, 7)), "at most 5"),
        (ONE + "<q2>Where?</q2><a2>x</a2>", "stands twice"),
        ("<q1>Where?</q1><a1></a1>", "is empty"),
    ],
)
def test_a_plan_is_up_to_five_pairs_in_order(plan: str, fault: str) -> None:
    parsed = Plan().parse(f"<plan>{plan}</plan><final_answer>x</final_answer>")
    assert fault in parsed.fault and bool(parsed.fault) == bool(fault)
    assert parsed.fields == {"plan": plan, "final_answer": "x"}


@pytest.mark.parametrize(
    ("routes", "spoke", "reason"),
    [
        (["yes"], ["router", "answerer"], "routed"),
        (["no", "yes"], ["router", "searcher", "retrieve", "router", "answerer"], "routed"),
        (["no"] * 9, [*["router", "searcher", "retrieve"] * 2, "answerer"], "last_round"),
        ([""] * 9, [*["router", "searcher", "retrieve"] * 2, "answerer"], "last_round"),
    ],
)
def test_the_router_decides_and_somebody_always_answers(
    routes: Sequence[str], spoke: list[str], reason: str, corpus: dict[str, str]
) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "router": f"<verify>{routes[n]}</verify>",
            "searcher": "<search>Mira</search>",
            "answerer": "<answer>Tarn</answer>",
        }[agent]

    trace = play(HierarchicalSearch(max_rounds=3, retriever=corpus), QUESTION, say)
    assert (agents_of(trace), trace.stop_reason, trace.answer) == (spoke, reason, "Tarn")
    if "searcher" in spoke:
        assert "Mira lives in Tarn." in trace.turns[-1].prompt_text


def test_agents_that_think_first_are_read_behind_their_thoughts(corpus: dict[str, str]) -> None:
    says = {
        "router": "<verify>no</verify>",
        "searcher": "<think>who?</think><search>Mira</search>",
        "answerer": "<answer>Tarn</answer>",
    }
    workflow = HierarchicalSearch(max_rounds=2, retriever=corpus, think=True)
    trace = play(workflow, QUESTION, lambda agent, *_: says[agent])
    assert (trace.answer, [t.is_format_ok for t in trace.turns]) == ("Tarn", [True, True, False])
    assert trace.tool_calls[0].request == {"queries": ["Mira"]}


def test_a_single_agent_searches_and_answers_or_runs_out_of_turns(corpus: dict[str, str]) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<answer>Tarn</answer>" if "Tarn" in inputs["found"] else "<search>Mira</search>"

    trace = play(SingleAgent(retriever=corpus), QUESTION, say)
    assert (agents_of(trace), trace.answer) == (["agent", "retrieve", "agent"], "Tarn")
    lost = play(SingleAgent(max_turns=2, retriever=corpus), QUESTION, lambda *_: "nothing")
    assert (lost.status, lost.stop_reason, lost.answer) == (EpisodeStatus.TRUNCATED, "last_turn", "")


def test_the_observer_reads_the_pioneer_and_has_the_last_word() -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return solution("7" if agent == "pioneer" else "5", steps=f"by {agent}")

    trace = play(PioneerObserver(), SUM, say)
    assert (agents_of(trace), trace.answer) == (["pioneer", "observer"], "5")
    assert "Another solution: by pioneer Answer: 7" in trace.turns[1].prompt_text
    assert trace.turns[1].parents == (0,)
