"""The shipped workflows, played by scripted agents: who speaks when, what reaches whose prompt, when it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from one_group import team_in_one_group

from pipelines.examples.made_up_facts import tasks as made_up_facts
from serve_apps.authoring.agent import Reply, Tool, ToolError, TracedText
from serve_apps.authoring.workflow import Outcome, Workflow, together
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.workflows.debate import HIDDEN, Debate, without_answer
from serve_apps.workflows.hierarchical_search import HierarchicalSearch
from serve_apps.workflows.iterative_search import IterativeSearch, Plan
from serve_apps.workflows.pioneer_observer import PioneerObserver
from serve_apps.workflows.reflective_code import ReflectiveCode
from serve_apps.workflows.single_agent import SingleAgent
from serve_apps.workflows.solver_verifier import SolverVerifier
from stores.traces.corpus import build_corpus
from stores.types import Completion, EpisodeStatus, FinishReason, Purpose, Task, Trace

pytestmark = pytest.mark.fast

Say = Callable[[str, int, Mapping[str, str]], str]
"""(agent, how often it has spoken before, inputs) -> completion."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


def play(workflow: Workflow, task: Task, say: Say, tokenizer: ChatTokenizer) -> Trace:
    spoken: dict[str, int] = {}

    async def complete(call: AgentCall) -> Completion:
        count = spoken.get(call.agent, 0)
        spoken[call.agent] = count + 1
        token_ids = tokenizer.encode_completion(say(call.agent, count, call.inputs))
        return Completion(
            token_ids=token_ids, logprobs=[0.0] * len(token_ids), finish_reason=FinishReason.STOP, policy_version=0
        )

    team = team_in_one_group(workflow, tokenizer, max_model_len=4096, max_tokens=256)
    spec = EpisodeSpec(
        run_id="r", iteration=1, purpose=Purpose.TRAIN, team_key="team", task=task, episode_index=0, run_seed=0
    )
    return asyncio.run(run_episode(spec, team=team, complete=complete, limits=EpisodeConfig()))


def agents_of(trace: Trace) -> list[str]:
    events = {t.turn_index: t.agent for t in trace.turns} | {c.call_index: c.tool for c in trace.tool_calls}
    return [events[i] for i in sorted(events)]


SUM = Task(task_id="t", prompt="2+3", answers=("5",))


def solution(answer: str, steps: str = "steps") -> str:
    return f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>"


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
def test_solver_and_verifier_go_on_until_approved(
    verdicts: list[str], spoke: list[str], reason: str, tokenizer: ChatTokenizer
) -> None:
    trace = play(
        SolverVerifier(max_rounds=3),
        SUM,
        lambda agent, n, _: rf"steps \boxed{{{n}}}" if agent == "solver" else verdicts[n],
        tokenizer,
    )
    assert (agents_of(trace), trace.stop_reason) == (spoke, reason)
    assert trace.answer == str(spoke.count("solver") - 1)
    solvers = [t for t in trace.turns if t.agent == "solver"]
    if len(solvers) > 1:
        feedback = "add them" if REJECTS in verdicts else "reject"
        assert f"Earlier answer: 0\nWhat the verifier said of it: {feedback}" in solvers[1].prompt_text
        assert set(solvers[1].parents) == ({0, 1} if REJECTS in verdicts else {0})
    assert [t.is_format_ok for t in trace.turns if t.agent == "verifier"] == ["VERDICT" in v for v in verdicts]


def test_debaters_do_not_read_each_others_answers_and_vote(tokenizer: ChatTokenizer) -> None:
    answers = {"debater_0": ["7", "8"], "debater_1": ["9", "8"], "debater_2": ["9", "6"]}
    trace = play(
        Debate(num_agents=3, num_rounds=2),
        SUM,
        lambda agent, n, _: solution(answers[agent][n], steps=f"{agent} says it is {answers[agent][n]}"),
        tokenizer,
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


def test_a_debater_that_fails_ends_the_calls_of_the_others(tokenizer: ChatTokenizer) -> None:
    ended: list[bool] = []

    class Team(Debate):
        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            endless = asyncio.ensure_future(asyncio.Event().wait())
            try:
                await together(endless, agents.debater_0(wrong="input"))
            finally:
                ended.append(endless.cancelled())
            raise AssertionError

    trace = play(Team(), SUM, lambda *_: "", tokenizer)
    assert (trace.status, ended) == (EpisodeStatus.AGENT_ERROR, [True])


def test_a_debate_ends_where_all_agree_and_a_summarizer_may_decide(tokenizer: ChatTokenizer) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<ANSWER>5</ANSWER>" if agent == "summarizer" else solution("4")

    trace = play(Debate(num_agents=2, num_rounds=5, decide="summarizer"), SUM, say, tokenizer)
    assert agents_of(trace) == ["debater_0", "debater_1", "summarizer"]
    assert (trace.answer, trace.stop_reason) == ("5", "consensus")


TESTS = {
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": ["4 5", "70 8"], "output": ["9", "78"]},
}


@pytest.mark.needs_program("bwrap")
def test_code_is_mended_until_it_passes_and_no_prompt_shows_a_test_that_pays(tokenizer: ChatTokenizer) -> None:
    programs = ["print(9)", "print(sum(map(int, input().split())))"]

    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "planner": "<pseudocode>add</pseudocode>",
            "coder": f"<code>{programs[min(n, 1)]}</code>",
            "reflector": "<reflection>read the input</reflection>",
        }[agent]

    task = Task(task_id="t", prompt="Add two numbers.", answers=(), metadata={"tests": json.dumps(TESTS)})
    trace = play(ReflectiveCode(), task, say, tokenizer)
    round_ = ["planner", "coder", "verify"]
    assert agents_of(trace) == [*round_, "reflector", *round_]
    assert [c.response["pass_rate"] for c in trace.tool_calls] == [0.5, 1.0]
    assert (trace.stop_reason, trace.answer) == ("passed", programs[1])
    prompts = "\n".join(t.prompt_text for t in trace.turns)
    assert "1 2 -> 3" in prompts
    assert "70" not in prompts and "4 5" not in prompts
    assert "70" not in json.dumps(trace.tool_calls[0].request)
    again = next(t for t in trace.turns if t.round_index == 1)
    assert "Earlier program: print(9)\nIts result: 1 of 2 tests passed; wrong answer" in again.prompt_text
    assert "Advice: read the input" in again.prompt_text
    reflector = next(t for t in trace.turns if t.agent == "reflector")
    assert "For 1 2 it should give 3, it gave: 9" in reflector.prompt_text
    assert "Read standard input" in reflector.prompt_text
    assert {agents_of(trace)[i] for i in reflector.parents} == {"coder", "verify"}


@pytest.mark.needs_program("bwrap")
def test_fewer_tests_may_run_than_are_shown(tokenizer: ChatTokenizer) -> None:
    tests = {
        "public_tests": {"input": ["1", "2", "3"], "output": ["1", "2", "3"]},
        "private_tests": {"input": ["5", "6"], "output": ["5", "6"]},
    }
    task = Task(task_id="t", prompt="Say it again.", answers=(), metadata={"tests": json.dumps(tests)})
    says = {"planner": "<pseudocode>say</pseudocode>", "coder": "<code>print(min(int(input()), 4))</code>"}
    workflow = ReflectiveCode(max_cases=2, max_examples=3, max_rounds=1)
    trace = play(workflow, task, lambda agent, n, _: says.get(agent, "<reflection>no</reflection>"), tokenizer)
    assert (trace.status, trace.error) == (EpisodeStatus.OK, "")
    assert [c.response["pass_rate"] for c in trace.tool_calls] == [0.0]


def test_code_without_hidden_tests_is_an_error_of_the_task(tokenizer: ChatTokenizer) -> None:
    task = Task(task_id="t7", prompt="Add.", answers=(), metadata={"tests": []})
    trace = play(ReflectiveCode(), task, lambda *_: "", tokenizer)
    assert trace.status is EpisodeStatus.AGENT_ERROR
    assert "task t7: holds no case" in trace.error


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "d.jsonl").write_text('{"id": "1", "title": "Mira", "text": "Mira lives in Tarn."}\n')
    build_corpus(str(folder / "index"), folder / "d.jsonl")
    return {"corpus": str(folder / "index")}


QUESTION = Task(task_id="q", prompt="Where does Mira live?", answers=("Tarn",))


def test_iterative_search_carries_summaries_into_the_next_rounds(
    corpus: dict[str, str], tokenizer: ChatTokenizer
) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "planner": "<plan><q1>Where is Mira?</q1><a1>unkown</a1></plan><final_answer>unkown</final_answer>",
            "answerer": "<final_answer>Tarn</final_answer>" if n else "<final_answer>unkown</final_answer>",
            "searcher": "<search>Mira</search>" if not n else "<end></end>",
            "summarizer": "<evidence>Mira lives in Tarn</evidence>",
            "updater": "<update>t1: Mira is in Tarn</update>",
        }[agent]

    trace = play(IterativeSearch(retriever=corpus), QUESTION, say, tokenizer)
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
    routes: Sequence[str], spoke: list[str], reason: str, corpus: dict[str, str], tokenizer: ChatTokenizer
) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "router": f"<verify>{routes[n]}</verify>",
            "searcher": "<search>Mira</search>",
            "answerer": "<answer>Tarn</answer>",
        }[agent]

    trace = play(HierarchicalSearch(max_rounds=3, retriever=corpus), QUESTION, say, tokenizer)
    assert (agents_of(trace), trace.stop_reason, trace.answer) == (spoke, reason, "Tarn")
    if "searcher" in spoke:
        assert "Mira lives in Tarn." in trace.turns[-1].prompt_text


def test_agents_that_think_first_are_read_behind_their_thoughts(
    corpus: dict[str, str], tokenizer: ChatTokenizer
) -> None:
    says = {
        "router": "<verify>no</verify>",
        "searcher": "<think>who?</think><search>Mira</search>",
        "answerer": "<answer>Tarn</answer>",
    }
    workflow = HierarchicalSearch(max_rounds=2, retriever=corpus, think=True)
    trace = play(workflow, QUESTION, lambda agent, *_: says[agent], tokenizer)
    assert (trace.answer, [t.is_format_ok for t in trace.turns]) == ("Tarn", [True, True, False])
    assert trace.tool_calls[0].request == {"queries": ["Mira"]}


def test_a_single_agent_searches_and_answers_or_runs_out_of_turns(
    corpus: dict[str, str], tokenizer: ChatTokenizer
) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<answer>Tarn</answer>" if "Tarn" in inputs["found"] else "<search>Mira</search>"

    trace = play(SingleAgent(retriever=corpus), QUESTION, say, tokenizer)
    assert (agents_of(trace), trace.answer) == (["agent", "retrieve", "agent"], "Tarn")
    lost = play(SingleAgent(max_turns=2, retriever=corpus), QUESTION, lambda *_: "nothing", tokenizer)
    assert (lost.status, lost.stop_reason, lost.answer) == (EpisodeStatus.TRUNCATED, "last_turn", "")


def test_a_retriever_that_fails_is_in_the_trace_and_the_episode_goes_on(tokenizer: ChatTokenizer) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return "<search>Mira</search>" if not n else "<answer>unkown</answer>"

    workflow = SingleAgent(retriever={"urls": ["http://127.0.0.1:9/retrieve"], "max_attempts": 2})
    trace = play(workflow, QUESTION, say, tokenizer)
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "unkown")
    assert "ConnectError" in trace.tool_calls[0].error and trace.tool_calls[0].num_attempts == 2
    assert "Found: <information></information>" in trace.turns[1].prompt_text


@pytest.mark.parametrize("settings", [{}, {"corpus": "a", "urls": ["b"]}, {"urls": ["http://a/b"], "retries": 3}])
def test_a_retriever_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"workflow\.settings\.retriever: (give|unknown)"):
        SingleAgent(retriever=settings)


def test_the_observer_reads_the_pioneer_and_has_the_last_word(tokenizer: ChatTokenizer) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return solution("7" if agent == "pioneer" else "5", steps=f"by {agent}")

    trace = play(PioneerObserver(), SUM, say, tokenizer)
    assert (agents_of(trace), trace.answer) == (["pioneer", "observer"], "5")
    assert "Another solution: by pioneer Answer: 7" in trace.turns[1].prompt_text
    assert trace.turns[1].parents == (0,)


def test_documents_from_a_function_are_indexed_once(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    settings = {"documents": "pipelines.examples.made_up_facts.tasks:documents", "num_people": 50}
    (task,) = made_up_facts.generate(seed=0, split="train", count=1, hops="one", num_people=50)
    trace = play(
        SingleAgent(retriever=settings),
        task,
        lambda agent, n, _: f"<answer>{task.answers[0]}</answer>" if n else f"<search>{task.prompt}</search>",
        tokenizer,
    )
    assert task.answers[0] in trace.turns[1].prompt_text
    (built,) = (tmp_path / "corpora").iterdir()
    before = built.stat().st_mtime_ns
    SingleAgent(retriever=settings)
    assert built.stat().st_mtime_ns == before


def documents_of(path: str) -> Iterator[dict[str, str]]:
    yield {"id": "1", "title": "Mira", "text": Path(path).read_text()}


def test_other_documents_of_the_same_function_are_indexed_anew(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    facts = tmp_path / "facts.txt"
    for place in ("Tarn", "Velland"):
        facts.write_text(f"Mira lives in {place}.")
        workflow = SingleAgent(retriever={"documents": f"{__name__}:documents_of", "path": str(facts)})
        said = ["<search>Mira</search>", "<answer>x</answer>"]
        trace = play(workflow, QUESTION, lambda agent, n, _, said=said: said[n], tokenizer)
        assert f"Mira lives in {place}." in trace.turns[1].prompt_text


async def _add(a: int, terms: list[int]) -> int:
    return a + sum(terms)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"a": "two", "terms": []}, "a: Input should be a valid integer"),
        ({"a": 1}, "terms: Missing required argument"),
        ({"a": 1, "terms": [1, "x"]}, r"terms\.1: Input should be a valid integer"),
        ({"a": 1, "terms": [], "b": 2}, "b: Unexpected keyword argument"),
    ],
)
def test_a_tools_arguments_are_checked_by_its_signature(arguments: dict[str, Any], said: str) -> None:
    assert asyncio.run(Tool(_add)(a=1, terms=[2, 3])) == 6
    with pytest.raises(ToolError, match=said):
        asyncio.run(Tool(_add)(**arguments))
