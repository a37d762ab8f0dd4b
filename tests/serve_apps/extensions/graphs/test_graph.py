"""Declared graphs: what they do, and what is refused with its line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import one_group
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.authoring.agent import Tool, ToolFault
from serve_apps.episode.scripted import play_scripted
from serve_apps.episode.team import AgentCall
from serve_apps.extensions.graphs.declared import Declared
from serve_apps.extensions.graphs.expressions import parse_expression
from serve_apps.extensions.graphs.graph import load_graph
from stores.types import Cause, Completion, EpisodeStatus, Task
from tests.serve_apps.plays import agents_of, play

pytestmark = pytest.mark.fast
VALUES: Mapping[str, Any] = {"step": 2, "question": "why", "answer": {"text": "red", "list": ["a", "b"], "none": None}}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("answer.text == 'red'", True),
        ('answer.text in ["blue", "red"]', True),
        ("not answer.text", False),
        ("step < 3 and step >= 1", True),
        ("1 < step < 2", False),
        ("answer.list[0] == 'a'", True),
        ("answer.list[7] == null", True),
        ("answer.none == null and missing.field == null", True),
        ("'a' in answer.list and 'c' not in answer.list", True),
        ("answer.text < 3", False),
        ("'x' in answer.none", False),
        ("true or false", True),
        ("step == -2", False),
    ],
)
def test_conditions_hold_or_not(text: str, holds: bool) -> None:
    assert parse_expression(text)(VALUES) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("len(answer.text) > 3", "calls a function"),
        ("__import__('os').system('true')", "calls a function"),
        ("answer.__class__ == 1", "is not of the language"),
        ("_x == 1", "is not of the language"),
        ("[x for x in answer]", "is not of the language"),
        ("answer.text + 'x'", "is not of the language"),
        ("lambda: 1", "is not of the language"),
        ("answer['text']", "is not of the language"),
        ("f'{answer}'", "is not of the language"),
        ("(x := 1)", "is not of the language"),
        ("1 +", "cannot be read"),
        ("", "cannot be read"),
        ("(" * 500 + ")" * 500, "cannot be read"),
        ("a " * 600, "split the node"),
        ("-" * 900 + "1", "nested more than"),
        ("b'x' == 1", "is not of the language"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_expression(text)


@given(st.text(alphabet="abc.()[]'\"=<>!+-_ \n0123andornti", max_size=40))
def test_no_text_is_ever_run(text: str) -> None:
    try:
        expression = parse_expression(text)
    except ValueError:
        return
    assert expression(VALUES) in (True, False)


QUESTION = Task(task_id="q", prompt="In which country does Mira live?", answers=("Velland",))


def written(folder: Path, text: str) -> str:
    path = folder / "graph.yaml"
    path.write_text(text)
    return str(path)


LOOP = """\
nodes:
  draft: {type: model, prompt: "Try {step}. {check.advice} {question}", parser: {tags: [answer]}, max_visits: 3}
  check: {type: model, prompt: "Check {draft.answer}", parser: {tags: [verdict, advice]}, max_visits: 3}
  done: {type: model, prompt: "Say {draft.answer}"}
edges:
  - {from: draft, to: check}
  - {from: check, to: draft, when: check.verdict != "ok"}
  - {from: check, to: done, when: check.verdict == "ok" or step >= 6}
start: [draft]
end: [done]
answer: "{draft.answer}"
"""


@pytest.mark.parametrize(
    ("verdicts", "spoke", "reason"),
    [
        (["ok"], ["draft", "check", "done"], "finished"),
        (["no", "ok"], [*["draft", "check"] * 2, "done"], "finished"),
        (["no"] * 3, [*["draft", "check"] * 3, "done"], "finished"),
    ],
)
def test_a_loop_ends_by_its_condition_or_its_bound(
    verdicts: list[str], spoke: list[str], reason: str, tmp_path: Path
) -> None:
    def say(agent: str, n: int, inputs: Mapping[str, str]) -> str:
        return {
            "draft": f"<answer>{n}</answer>",
            "check": f"<verdict>{verdicts[min(n, len(verdicts) - 1)]}</verdict><advice>more</advice>",
            "done": "done",
        }[agent]

    trace = play(Declared(written(tmp_path, LOOP)), QUESTION, say)
    assert (agents_of(trace), trace.stop_reason, trace.error) == (spoke, reason, "")
    if len(spoke) > 3:
        assert "more" in next(t for t in trace.turns if t.agent == "draft" and t.round_index == 1).prompt_text


BESIDE_A_LOOP = """\
nodes:
  search: {type: model, prompt: "Search {question}", parser: {tags: [found]}}
  draft: {type: model, prompt: "Draft {question}", parser: {tags: [answer]}}
  check: {type: model, prompt: "Check {draft.answer} {fix.answer}", parser: {tags: [verdict]}, max_visits: 3}
  fix: {type: model, prompt: "Fix {draft.answer}", parser: {tags: [answer]}, max_visits: 2}
  end: {type: model, prompt: "Facts {search.found}, mended {fix.answer}"}
edges:
  - {from: search, to: end}
  - {from: draft, to: check}
  - {from: check, to: fix, when: check.verdict == "wrong"}
  - {from: fix, to: check}
  - {from: check, to: end, when: check.verdict == "right"}
start: [search, draft]
end: [end]
answer: "{end.text}"
"""


def test_a_node_waits_for_a_loop_that_leads_to_it(tmp_path: Path) -> None:
    says = {
        "search": "<found>Tarn</found>",
        "draft": "<answer>bad</answer>",
        "fix": "<answer>good</answer>",
        "end": "x",
    }
    verdicts = ["<verdict>wrong</verdict>", "<verdict>right</verdict>"]
    trace = play(
        Declared(written(tmp_path, BESIDE_A_LOOP)),
        QUESTION,
        lambda agent, n, _: verdicts[n] if agent == "check" else says[agent],
    )
    assert agents_of(trace) == ["search", "draft", "check", "fix", "check", "end"]
    assert trace.turns[-1].prompt_text == "Facts Tarn, mended good"


def test_steps_run_out(tmp_path: Path) -> None:
    text = LOOP.replace("start:", "max_steps: 2\nstart:")
    trace = play(
        Declared(written(tmp_path, text)),
        QUESTION,
        lambda agent, n, _: "<answer>1</answer>" if agent == "draft" else "<verdict>no</verdict><advice>a</advice>",
    )
    assert (trace.status, trace.stop_reason, trace.answer) == (EpisodeStatus.TRUNCATED, "max_steps", "1")


async def _dead(queries: str) -> str:
    raise ToolFault("the server is down")


dead = Tool(_dead)


def test_a_tool_that_fails_fails_the_episode_unless_its_node_is_fail_open(tmp_path: Path) -> None:
    text = """\
nodes:
  find: {type: tool, tool: retrieve, arguments: {queries: "{question}"}%s}
  say: {type: model, prompt: "Found: {find}."}
edges: [{from: find, to: say}]
start: [find]
end: [say]
answer: "{say.text}"
"""
    dead = {"retrieve": {"path": f"{__name__}:dead"}}
    failed = play(Declared(written(tmp_path, text % ""), dead), QUESTION, lambda *_: "x")
    assert failed.status is EpisodeStatus.TOOL_ERROR
    went_on = play(Declared(written(tmp_path, text % ", fail_open: true"), dead), QUESTION, lambda *_: "x")
    assert (went_on.status, went_on.answer) == (EpisodeStatus.OK, "x")
    assert went_on.turns[0].prompt_text == "Found: ."
    assert went_on.tool_calls[0].error == "the server is down"


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  done: {", "  lost: {type: model, prompt: x}\n  done: {", r"graph\.yaml:4: node lost cannot be reached"),
        ("to: check}", "to: chekc}", r":6: an edge leads to 'chekc', which is no node: did you mean 'check'"),
        ("start: [draft]", "start: [nobody]", r":9: start names 'nobody'"),
        ("{draft.answer}\"}", "{draft.anwser}\"}", r":4: node done, prompt reads 'draft.anwser': draft has the fields answer, text"),
        ("check.verdict != \"ok\"", "len(check.verdict) > 1", r":7: edge check -> draft: condition .* calls a function"),
        ("check.verdict != \"ok\"", "other.verdict != 1", r":7: edge check -> draft reads 'other.verdict': no node 'other'"),
        (", max_visits: 3}\n  check", "}\n  check", None),
        (", max_visits: 3", "", r":2: a cycle without bound: check, draft"),
        ("type: model, prompt: \"Say", "type: modl, prompt: \"Say", r":4: nodes\.done\.type"),
        ("answer: \"{draft.answer}\"\n", "answer: \"{draft.answer}\"\nbound: 3\n", r":12: bound: extra inputs"),
        ("  done: {type: model, prompt: \"Say {draft.answer}\"}", "  done: {type: model}", r":4: node done: a model node needs a `prompt`"),
        ("{tags: [answer]}", "{tags: [answer], json: [a]}", r":2: node draft: parser: give one of"),
        ("{tags: [answer]}", "{tags: [answer], valid_reward: .inf}", r":2: nodes\.draft\.\S*valid_reward: .*finite number"),
        ("end: [done]", "end: [draft]", r":4: no edge leads from node done to an end"),
        ("nodes:", "nodes: [", "not YAML"),
        ("{check.advice}", "{check.advice[0]}", r":2: node draft, prompt: '\{check.advice\[0\]\}' is no field"),
        ("{check.advice}", "{check}", r":2: node draft, prompt reads 'check': say which of its fields, check.verdict"),
        ("  done: {type: model, prompt: \"Say", "  in: {type: model, prompt: \"Say", r":4: node 'in': letters, digits"),
        ("  done: {type: model, prompt: \"Say", "  step: {type: model, prompt: \"Say", r":4: node 'step': letters"),
        ("  done: {", "  check: {type: model, prompt: x}\n  done: {", r":4: 'check' stands twice"),
        ("[verdict, advice]", "[\"a(b\"]", r":3: node check: parser: 'a\(b' is no name of a tag"),
        ("Say {draft.answer}\"}", "Say {draft.answer}\", cut: [question]}", r":4: node done: cut: 'question' is not read by it"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused_with_its_line(old: str, new: str, said: str | None, tmp_path: Path) -> None:
    text = LOOP.replace(old, new) if old == ", max_visits: 3" else LOOP.replace(old, new, 1)
    assert text != LOOP
    path = written(tmp_path, text)
    if said is None:
        load_graph(path)
        return
    with pytest.raises(ValueError, match=said):
        load_graph(path)


def test_a_tool_that_is_not_given_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"node one calls tool 'wait': name it in workflow\.settings\.tools"):
        Declared(written(tmp_path, SLOW % ""))


TYPED = """\
nodes:
  grade: {type: model, prompt: "{question}", parser: {json: [score, ok, names]}}
  good: {type: model, prompt: "Good {grade.names.1} {grade.score}"}
  bad: {type: model, prompt: "Bad"}
edges:
  - {from: grade, to: good, when: "grade.score >= 7 and grade.ok == true"}
  - {from: grade, to: bad, when: not (grade.score >= 7 and grade.ok == true)}
start: [grade]
end: [good, bad]
answer: "{good.text}{bad.text}"
"""


@pytest.mark.parametrize(
    ("grade", "spoke"),
    [
        ({"score": 8, "ok": True, "names": ["a", "Mira"]}, ["grade", "good"]),
        ({"score": 8, "ok": False, "names": ["a"]}, ["grade", "bad"]),
        ({"score": "8", "ok": True, "names": ["a"]}, ["grade", "bad"]),
    ],
)
def test_numbers_and_truth_stay_what_they_are(grade: dict[str, Any], spoke: list[str], tmp_path: Path) -> None:
    trace = play(
        Declared(written(tmp_path, TYPED)),
        QUESTION,
        lambda agent, n, _: json.dumps(grade) if agent == "grade" else "said",
    )
    assert (agents_of(trace), trace.answer) == (spoke, "said")
    if spoke[-1] == "good":
        assert trace.turns[-1].prompt_text == "Good Mira 8"
        assert trace.turns[-1].parents == (0,)


SLOW = """\
nodes:
  one: {type: tool, tool: wait, arguments: {name: "one"}, timeout_s: 2%s}
  other: {type: tool, tool: wait, arguments: {name: "other"}, timeout_s: 5}
  say: {type: model, prompt: "Found: {one}, {other}."}
edges: [{from: one, to: say}, {from: other, to: say}]
start: [one, other]
end: [say]
answer: "{say.text}"
"""
WAITS: dict[str, float] = {}


async def _wait(name: str) -> str:
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(WAITS.get(name, 0.0))
    WAITS[f"{name} began"] = began
    return name


wait = Tool(_wait)


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        pytest.param(", fail_open: true", EpisodeStatus.OK, "", marks=pytest.mark.nightly),
        ("", EpisodeStatus.TIMEOUT, "node one: no answer after 2 s"),
    ],
)
def test_a_node_that_takes_too_long_is_named_and_its_call_recorded(
    how: str, status: EpisodeStatus, error: str, tmp_path: Path
) -> None:
    WAITS.update(one=30.0, other=0.0)
    workflow = Declared(written(tmp_path, SLOW % how), {"wait": {"path": f"{__name__}:wait"}})
    trace = play(workflow, QUESTION, lambda *_: "x")
    assert (trace.status, trace.error) == (status, error)
    late = next(c for c in trace.tool_calls if c.request == {"name": "one"})
    assert late.error.startswith("given up after 2")
    if not error:
        assert trace.turns[0].prompt_text == "Found: , other."
        assert trace.outcome_metadata == {"failed_nodes": {"one": "node one: no answer after 2 s"}}


def test_an_engine_that_does_not_answer_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    async def complete(call: AgentCall) -> Completion:
        await asyncio.sleep(0.5 if call.agent == "one" else 30)
        return await one_group.saying(lambda _: "so")(call)

    graph = """\
nodes:
  one: {type: model, prompt: "Say {question}"}
  two: {type: model, prompt: "Say {one.text}", timeout_s: 0.2}
edges: [{from: one, to: two}]
start: [one]
end: [two]
answer: "{two.text}"
"""
    workflow = Declared(written(tmp_path, graph))
    trace = one_group.play(workflow, complete, task=QUESTION)
    assert (trace.cause, trace.error) == (Cause.INFRASTRUCTURE, "node two: no answer after 0.2 s")
    assert not trace.is_outcome


def test_nodes_that_are_ready_work_side_by_side(tmp_path: Path) -> None:
    WAITS.update(one=0.5, other=0.5)
    workflow = Declared(written(tmp_path, SLOW % ""), {"wait": {"path": f"{__name__}:wait"}})
    trace = play(workflow, QUESTION, lambda *_: "x")
    assert trace.turns[0].prompt_text == "Found: one, other."
    assert abs(WAITS["one began"] - WAITS["other began"]) < 0.45


def test_a_graphs_context_is_cut_and_its_instruction_is_not(tmp_path: Path) -> None:
    text = """\
nodes:
  find: {type: tool, tool: wait, arguments: {name: "{question}"}}
  say: {type: model, prompt: "Begin. Found: {find} End.", cut: [find], max_tokens: 16}
edges: [{from: find, to: say}]
start: [find]
end: [say]
answer: "{say.text}"
"""
    long = Task(task_id="q", prompt="red green blue " * 2000, answers=())
    workflow = Declared(written(tmp_path, text), {"wait": {"path": f"{__name__}:wait"}})
    trace = play(workflow, long, lambda *_: "x", max_model_len=4096)
    (turn,) = trace.turns
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "x")
    assert turn.prompt_text.startswith("Begin. Found: red") and turn.prompt_text.endswith(" End.")
    assert "[...]" in turn.prompt_text and turn.cut["find"] > 10_000
    assert turn.parents == (0,)


def test_an_end_need_not_be_the_end(tmp_path: Path) -> None:
    text = TYPED.replace("end: [good, bad]", "end: [good, bad]\nstop_on_end: false").replace(
        ", when: not (grade.score >= 7 and grade.ok == true)", ""
    )
    says = {"grade": json.dumps({"score": 8, "ok": True, "names": ["a"]}), "good": "1", "bad": "2"}
    trace = play(Declared(written(tmp_path, text)), QUESTION, lambda agent, *_: says[agent])
    assert (sorted(agents_of(trace)), trace.answer) == (["bad", "good", "grade"], "12")


@pytest.mark.parametrize("path", ["json:dumps", "tests.serve_apps.extensions.graphs.test_graph:QUESTION"])
def test_what_is_no_tool_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="wait"):
        Declared(written(tmp_path, SLOW % ""), {"wait": {"path": path}})


def made(retriever: dict[str, str], top_k: int) -> Tool:
    async def wait() -> str:
        return f"{top_k} of {retriever['corpus']}"

    return Tool(wait, timeout_s=1)


def test_a_maker_of_the_authors_own_takes_keys_that_extensions_have_too(tmp_path: Path) -> None:
    settings = {"path": f"{__name__}:made", "retriever": {"corpus": "mine"}, "top_k": 2}
    tool = Declared(written(tmp_path, SLOW % ""), {"wait": settings}).tools["wait"]
    assert asyncio.run(tool()) == "2 of mine"


CHOOSING = """
nodes:
  next:
    type: choice
    prompt: "{question} so far {solver.answer}, says {next.message}\\n{options}"
    options: {solver: works it out, checker: "", stop: the answer is final}
    messages: [checker]
    max_visits: 4
  solver: {type: model, prompt: "Solve {question}", parser: {tags: [answer]}, max_visits: 2}
  checker: {type: model, prompt: "Check {solver.answer}, {next.message}"}
edges:
  - {from: solver, to: next}
  - {from: checker, to: next}
start: [next]
end: []
answer: "{solver.answer}"
"""


def choosing(folder: Path, text: str = CHOOSING) -> Declared:
    path = folder / "choosing.yaml"
    path.write_text(text)
    return Declared(graph=str(path))


def test_a_choice_node_leads_where_it_chooses_and_stop_ends_the_episode(tmp_path: Path) -> None:
    says = {
        "next": ["solver", "checker", "is it right?", "stop"],
        "solver": ["<answer>7</answer>"],
        "checker": ["it is"],
    }
    task = Task(task_id="t", prompt="3 + 4", answers=("7",))
    trace = play_scripted(choosing(tmp_path), task, says)
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "7", "stop"), trace.error
    agents = [turn.agent for turn in trace.turns]
    assert agents == ["next", "solver", "next", "next", "checker", "next"], "a message is a turn of its own"
    assert trace.turns[4].prompt_text == "Check 7, is it right?"
    assert trace.turns[5].prompt_text.endswith("A solver: works it out\nC stop: the answer is final")


def test_a_node_without_visits_is_not_offered_and_a_single_option_is_taken_without_asking(tmp_path: Path) -> None:
    text = CHOOSING.replace('{solver: works it out, checker: "", stop: the answer is final}', "{solver: '', stop: ''}")
    text = text.replace("    messages: [checker]\n", "").replace("  - {from: checker, to: next}\n", "")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("  checker:"))
    task = Task(task_id="t", prompt="3 + 4", answers=("7",))
    says = {"next": ["solver", "solver"], "solver": ["<answer>6</answer>", "<answer>7</answer>"]}
    trace = play_scripted(choosing(tmp_path, text), task, says)
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "7", "stop"), trace.error
    assert [turn.agent for turn in trace.turns] == ["next", "solver", "next", "solver"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{solver: works", "{solvr: works", "node next offers 'solvr', which is no node: did you mean 'solver'?"),
        ("\\n{options}", "", r"node next: \{options\} is missing"),
        ("messages: [checker]", "messages: [stopp]", r"node next: Choice: messages = \['stopp'\]"),
        ("solver: {type: model,", "solver: {type: model, options: {next: ''},", "node solver: `options` and `messages` are for choice nodes"),
        ("{next.message}\"}", "{next.choise}\"}", "next has the fields choice, message, text"),
        ("    max_visits: 4\n", "", "a cycle without bound: "),
        (", stop: the answer is final", "", "nothing ends the episode: name nodes in `end`, or let a choice node offer `stop`"),
    ],
)  # fmt: skip
def test_a_choice_node_that_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in CHOOSING
    text = CHOOSING.replace(old, new)
    if "cycle" in said:
        text = text.replace(", max_visits: 2", "")
    with pytest.raises(ValueError, match=r"choosing.yaml:\d+: .*" + said):
        choosing(tmp_path, text)
