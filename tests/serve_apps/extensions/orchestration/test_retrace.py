"""Episodes of a fixed workflow, played again under an orchestrator: its choices, the recorded replies, and what cannot be played."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_apps.authoring.agent import Agent, Tool, ToolFault
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow, together
from serve_apps.episode.scripted import GROUP, ByteTokenizer, play_scripted
from serve_apps.episode.team import ActingTeam
from serve_apps.extensions.orchestration.orchestrated import Orchestrated
from serve_apps.extensions.orchestration.retrace import NotRetraced
from stores.types import Purpose, Task, Trace

pytestmark = pytest.mark.fast

TASK = Task(task_id="t", prompt="2 + 2 * 3", answers=("8",))
HERE = "tests.serve_apps.extensions.orchestration.test_retrace:"
ASKED: list[str] = []


async def look_up(query: str) -> str:
    ASKED.append(query)
    return f"of {query}: 6"


class Fixed(Workflow):
    """Reads, looks up, solves twice; the last answer counts. A greeter speaks first, whom no step calls."""

    greeter = Agent(prompt="Greet.")
    reader = Agent(prompt="What to look up for {question}?", contract=Tags("QUERY"))
    solver = Agent(prompt="Solve {question}, {found}", contract=Tags("ANSWER"))
    look = Tool(look_up)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await agents.greeter()
        query = await agents.reader(question=task.prompt)
        found = await tools.look(query=query["QUERY".lower()])
        await agents.solver(question=task.prompt, found=found)
        last = await agents.solver(question=task.prompt, found=found)
        return Outcome(answer=last["answer"])


async def fail(query: str) -> str:
    raise ToolFault("503")


class Down(Fixed):
    """Its search is down, and it goes on."""

    look = Tool(fail, fail_open=True, fallback="the search is down")


class Side(Fixed):
    """Solves and reads side by side."""

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        async def search() -> None:
            query = await agents.reader(question=task.prompt)
            await tools.look(query=query["query"])

        solved, _ = await together(agents.solver(question=task.prompt, found=""), search())
        return Outcome(answer=solved["answer"])


SAYS = {
    "greeter": ["hello"],
    "reader": ["<QUERY>2 * 3</QUERY>"],
    "solver": ["<ANSWER>7</ANSWER>", "<ANSWER>8</ANSWER>"],
}
STEPS: dict[str, dict[str, Any]] = {
    "solve": {"agent": "solver"},
    "search": {"agent": "reader", "tool": "look", "arguments": {"query": "{query}"}, "result": "found"},
}


def under(steps: dict[str, dict[str, Any]] = STEPS, **settings: Any) -> ActingTeam:
    """A team whose orchestrator takes these steps; a token is a byte."""
    workflow = Orchestrated(team={"path": HERE + "Fixed"}, steps=steps, **settings)
    return ActingTeam(
        workflow=workflow,
        workflow_path="serve_apps.extensions.orchestration.orchestrated:Orchestrated",
        group_of=dict.fromkeys(workflow.agents, GROUP),
        tokenizers={GROUP: ByteTokenizer()},
        max_model_len={GROUP: 1 << 20},
        sampling={name: agent.sampling for name, agent in workflow.agents.items()},
        policy_versions={GROUP: 0},
        team_key="orchestrated",
    )


def retraced(trace: Trace, team: ActingTeam) -> Trace:
    return team.workflow.retraced(trace, team=team, run_id="new", seed=1)


def steps_of(trace: Trace) -> list[str]:
    steps: list[str] = trace.outcome_metadata["steps"]
    return steps


def test_the_choices_are_the_order_of_the_calls_and_the_replies_those_of_the_record() -> None:
    stored = play_scripted(Fixed(), TASK, SAYS)
    ASKED.clear()
    played = retraced(stored, under())
    assert steps_of(played) == ["search", "solve", "solve"] and played.stop_reason == "stop"
    choices = [turn for turn in played.turns if turn.agent == "orchestrator"]
    assert [turn.fields["choice"] for turn in choices] == ["search", "solve", "solve", "stop"]
    others = [turn for turn in played.turns if turn.agent != "orchestrator"]
    kept = {agent: [t.completion_token_ids for t in stored.turns if t.agent == agent] for agent in ("reader", "solver")}
    assert kept == {agent: [t.completion_token_ids for t in others if t.agent == agent] for agent in kept}
    assert "of 2 * 3: 6" in others[1].prompt_text and ASKED == [], "the tool's response is the recorded one"
    assert (played.answer, played.purpose, played.run_id) == ("8", Purpose.DEMONSTRATION, "new")


def test_a_tool_that_failed_gives_its_fallback_again() -> None:
    stored = play_scripted(Down(), TASK, SAYS)
    under_down = replace(under(), workflow=Orchestrated(team={"path": HERE + "Down"}, steps=STEPS))
    played = retraced(stored, under_down)
    read = [[turn.prompt_text for turn in trace.turns if turn.agent == "solver"] for trace in (stored, played)]
    assert read[0] == read[1] and "the search is down" in read[0][0]


def test_calls_side_by_side_are_one_choice_where_a_step_makes_them() -> None:
    stored = play_scripted(Side(), TASK, SAYS)
    both = STEPS | {"both": {"together": ["search", "solve"]}}
    assert steps_of(retraced(stored, under(both))) == ["both"]
    assert sorted(steps_of(retraced(stored, under()))) == ["search", "solve"]


@pytest.mark.parametrize(
    ("steps", "settings", "reason"),
    [
        (STEPS | {"solve": {"agent": "solver", "max_calls": 1}}, {}, "the next call is of solver, and the orchestrator may choose search, stop"),
        (STEPS | {"solve": {"agent": "solver", "message": True}}, {}, "the next call is of solver"),
        ({"solve": {"agent": "solver"}, "greet": {"agent": "greeter", "needs": ["answer"]}}, {}, "the next call is of greeter, and the orchestrator's only step calls solver"),
        (STEPS, {"max_calls": 3}, "it ended before the call of solver"),
        ({"solve": {"agent": "solver", "max_calls": 3}}, {"max_calls": 3, "answer": "answer"}, ""),
    ],
)  # fmt: skip
def test_an_episode_that_the_steps_cannot_make_is_refused(
    steps: dict[str, dict[str, Any]], settings: dict[str, Any], reason: str
) -> None:
    stored = play_scripted(Fixed(), TASK, SAYS)
    if not reason:
        assert steps_of(retraced(stored, under(steps, **settings))) == ["solve", "solve"]
        return
    with pytest.raises(NotRetraced, match=reason):
        retraced(stored, under(steps, **settings))


def test_another_answer_on_the_board_is_refused() -> None:
    stored = replace(play_scripted(Fixed(), TASK, SAYS), answer="9")
    with pytest.raises(NotRetraced, match="the answer on the board is '8', the episode's '9'"):
        retraced(stored, under())
