"""An orchestrator over the agents and tools of a team: what it is offered, what the steps write, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow, load_workflow
from serve_apps.episode.scripted import play_scripted
from serve_apps.extensions.orchestration.orchestrated import Orchestrated
from stores.types import EpisodeStatus, Task, Trace, Turn

pytestmark = pytest.mark.fast

TASK = Task(task_id="t", prompt="2 + 2 * 3", answers=("8",))
HERE = "tests.serve_apps.extensions.orchestration.test_orchestrated:"


async def look_up(query: str) -> str:
    return f"of {query}: 6"


class Pair(Workflow):
    """A team with a tool."""

    solver = Agent(prompt="Solve {question}, {found}{message}", contract=Tags("ANSWER"))
    reader = Agent(prompt="What to look up for {question}?", contract=Tags("QUERY"))
    look = Tool(look_up)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        raise AssertionError("the orchestrator plays instead")


STEPS: dict[str, dict[str, Any]] = {
    "solve": {"agent": "solver", "about": "answers"},
    "search": {"agent": "reader", "tool": "look", "arguments": {"query": "{query}"}, "result": "found", "adds": ["found"]},
    "both": {"together": ["solve", "search"]},
}  # fmt: skip


def orchestrated(steps: dict[str, dict[str, Any]] = STEPS, **settings: Any) -> Orchestrated:
    return Orchestrated(team={"path": HERE + "Pair"}, steps=steps, **settings)


def by(trace: Trace, agent: str) -> list[Turn]:
    return [turn for turn in trace.turns if turn.agent == agent]


def test_steps_write_on_the_board_and_the_answer_is_what_stands_there_at_the_end() -> None:
    says = {
        "orchestrator": ["search", "search", "solve", "stop"],
        "reader": ["<QUERY>2 * 3</QUERY>", "<QUERY>3 * 2</QUERY>"],
        "solver": ["<ANSWER>8</ANSWER>"],
    }
    trace = play_scripted(orchestrated(), TASK, says)
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "8", "stop"), trace.error
    assert trace.outcome_metadata == {"steps": ["search", "search", "solve"]}
    (solved,) = by(trace, "solver")
    assert "of 2 * 3: 6\nof 3 * 2: 6" in solved.prompt_text
    assert set(solved.parents) == {call.call_index for call in trace.tool_calls}
    asked = by(trace, "orchestrator")
    assert asked[0].prompt_text.endswith("Known: \nDone: \nLeft: 8\nA solve: answers\nB search\nC both")
    assert "Known: query: 3 * 2; found: of 2 * 3: 6\nof 3 * 2: 6; answer: 8\nDone: search, search, solve\nLeft: 3" in (
        asked[3].prompt_text
    )
    assert asked[3].prompt_text.endswith("A solve: answers\nB search\nC both\nD stop"), "now there is an answer"
    assert solved.turn_index in asked[3].parents


def test_steps_side_by_side_see_the_board_of_before_and_count_as_many_calls() -> None:
    says = {"orchestrator": ["both", "stop"], "reader": ["<QUERY>x</QUERY>"], "solver": ["<ANSWER>8</ANSWER>"]}
    trace = play_scripted(orchestrated(max_calls=4), TASK, says)
    assert (trace.answer, trace.outcome_metadata) == ("8", {"steps": ["both"]}), trace.error
    assert "6" not in by(trace, "solver")[0].prompt_text.partition(",")[2]
    assert "Left: 1" in by(trace, "orchestrator")[1].prompt_text


def test_the_last_calls_are_bounded_and_a_step_that_does_not_fit_is_not_offered() -> None:
    says = {"orchestrator": ["solve", "solve"], "solver": ["<ANSWER>7</ANSWER>", "<ANSWER>8</ANSWER>"]}
    trace = play_scripted(orchestrated(max_calls=2), TASK, says)
    assert (trace.answer, trace.stop_reason) == ("8", "max_calls"), trace.error
    assert by(trace, "orchestrator")[1].prompt_text.endswith("A solve: answers\nD stop"), "a search is two calls"


def test_what_is_needed_must_stand_on_the_board_and_a_single_option_is_taken_without_asking() -> None:
    steps = {
        "search": {**STEPS["search"], "max_calls": 1},
        "solve": {"agent": "solver", "needs": ["found"], "max_calls": 1},
    }
    says = {"reader": ["<QUERY>x</QUERY>"], "solver": ["<ANSWER>8</ANSWER>"]}
    trace = play_scripted(orchestrated(steps), TASK, says)
    assert (trace.answer, trace.stop_reason, by(trace, "orchestrator")) == ("8", "stop", []), trace.error


def test_nothing_is_left_to_do_ends_without_an_answer() -> None:
    steps = {"solve": {"agent": "solver", "max_calls": 1}}
    trace = play_scripted(orchestrated(steps), TASK, {"solver": ["no tags"]})
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "", "stop")


def test_an_option_may_carry_a_message() -> None:
    steps = {"solve": {"agent": "solver", "message": True}}
    says = {"orchestrator": ["solve", "multiply first", "stop"], "solver": ["<ANSWER>8</ANSWER>"]}
    trace = play_scripted(orchestrated(steps), TASK, says)
    assert trace.answer == "8", trace.error
    assert by(trace, "solver")[0].prompt_text == "Solve 2 + 2 * 3, multiply first"


def test_a_copy_of_an_agent_may_be_of_another_model_group() -> None:
    steps = {"cheap": {"agent": "solver"}, "strong": {"agent": "expert"}}
    workflow = orchestrated(steps, copies={"expert": "solver"})
    assert list(workflow.agents) == ["orchestrator", "solver", "expert"]
    assert workflow.agents["expert"] == workflow.agents["solver"]


def test_a_message_is_for_the_step_that_it_was_written_to() -> None:
    steps = {"solve": {"agent": "solver", "message": True}, "again": {"agent": "solver"}}
    says = {
        "orchestrator": ["solve", "multiply first", "again", "stop"],
        "solver": ["<ANSWER>7</ANSWER>", "<ANSWER>8</ANSWER>"],
    }
    trace = play_scripted(orchestrated(steps), TASK, says)
    assert [turn.prompt_text for turn in by(trace, "solver")] == [
        "Solve 2 + 2 * 3, multiply first",
        "Solve 2 + 2 * 3, ",
    ]


def test_a_reply_without_the_field_leaves_what_stood_on_the_board() -> None:
    says = {"orchestrator": ["solve", "solve", "stop"], "solver": ["<ANSWER>8</ANSWER>", "no tags"]}
    assert play_scripted(orchestrated(), TASK, says).answer == "8"


def test_names_of_options_are_quoted_from_nowhere() -> None:
    steps = {"search_the_documents": STEPS["search"], "solve": STEPS["solve"]}
    says = {
        "orchestrator": ["search_the_documents", "search_the_documents", "solve", "stop"],
        "reader": ["<QUERY>2 * 3</QUERY>", "<QUERY>3 * 2</QUERY>"],
        "solver": ["<ANSWER>8</ANSWER>"],
    }
    trace = play_scripted(orchestrated(steps), TASK, says)
    chosen = {turn.turn_index for turn in by(trace, "orchestrator")}
    assert trace.answer == "8" and all(not set(turn.parents) & chosen for turn in by(trace, "orchestrator"))


def test_the_orchestrator_sees_what_is_named() -> None:
    says = {
        "orchestrator": ["search", "solve", "stop"],
        "reader": ["<QUERY>x</QUERY>"],
        "solver": ["<ANSWER>8</ANSWER>"],
    }
    trace = play_scripted(orchestrated(shows=["answer"], prompt="{board}|{options}"), TASK, says)
    assert [turn.prompt_text.partition("|")[0].strip() for turn in by(trace, "orchestrator")] == ["", "", "answer: 8"]


def test_the_steps_are_part_of_the_teams_identity() -> None:
    other = {**STEPS, "solve": {"agent": "solver", "max_calls": 1}}
    assert (
        orchestrated().prompts_sha256 != orchestrated(other).prompts_sha256 != orchestrated(max_calls=3).prompts_sha256
    )


@pytest.mark.parametrize(
    ("steps", "settings", "fault"),
    [
        ({"go": {"agent": "sover"}}, {}, "steps.go.agent: no agent 'sover'; the team has solver, reader"),
        ({"go": {"tool": "lok"}}, {}, "steps.go.tool: no tool 'lok'; the team has look"),
        ({}, {}, "steps: name one at least"),
        (STEPS, {"max_calls": 0}, "max_calls = 0: give at least 1"),
        (STEPS, {"answer": "anwser"}, "answer: nothing writes 'anwser'; steps write answer, found"),
        (STEPS, {"shows": ["anwser"]}, "shows: nothing writes 'anwser'"),
        ({"go": {"agent": "solver", "needs": ["fund"]}}, {}, "steps.go.needs: nothing writes 'fund'"),
        ({"go": {"tool": "look", "arguments": {"query": "{qurey}"}}}, {"answer": "look"}, "steps.go.arguments: nothing writes 'qurey'"),
        ({"go": {"tool": "look", "arguments": {"qurey": "x"}}}, {}, "steps.go.arguments: look takes no 'qurey'; it takes query"),
        ({"go": {"agent": "solver", "arguments": {"a": "b"}}}, {}, "steps.go.arguments: it does nothing here"),
        ({"go": {"tool": "look", "writes": {"a": "b"}}}, {}, "steps.go.writes: it does nothing here"),
        ({**STEPS, "all": {"together": ["solve", "solve"]}}, {}, "a step stands twice"),
        ({"go": {"agent": "solver", "writes": {"answer": "question"}}}, {}, "the task stands on the board as 'question'"),
        (STEPS, {"copies": {"solver": "reader"}}, "copies.solver: the team has an agent of this name"),
        (STEPS, {"prompt": "{bord} {options}"}, "prompt: unknown bord: it may have board, done"),
        ({f"s{i}": {"agent": "solver"} for i in range(20)}, {}, "21 options"),
        ({"go": None}, {}, "steps.go: Input should be"),
        ({"go": {}}, {}, "steps.go: give `agent`, `tool` or both"),
        ({"go": {"agent": "solver", "together": ["go"]}}, {}, "steps.go: give `agent`, `tool` or both"),
        ({**STEPS, "all": {"together": ["solve", "both"]}}, {}, r"steps.all.together = \['both'\]"),
        ({"stop": {"agent": "solver"}}, {}, "steps.stop: 'stop' is there by itself"),
        ({"go": {"agent": "solver", "writes": {"text": "x"}}}, {}, r"steps.go.writes = \['text'\]: fields of solver are answer"),
        ({"go": {"agnt": "solver"}}, {}, "steps.go.agnt: extra inputs are not permitted"),
        ({"go": {"agent": "solver"}}, {"copies": {"x": "sover"}}, "copies.x: no agent 'sover'; the team has solver, reader"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit_are_refused_by_name(steps: dict[str, Any], settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        load_workflow(
            "serve_apps.extensions.orchestration.orchestrated:Orchestrated",
            {"team": {"path": HERE + "Pair"}, "steps": steps, **settings},
        )
