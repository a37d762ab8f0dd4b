"""An episode with written completions: the real runner and contracts, and a clear error where the script does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.episode.scripted import play_scripted
from stores.types import EpisodeStatus, Task

pytestmark = pytest.mark.fast

TASK = Task(task_id="t", prompt="3 × 4", answers=("12",))


class TwoTries(Workflow):
    """Asks its writer twice, its reader once."""

    writer = Agent(prompt="Compute {question}", contract=Tags("ANSWER"))
    reader = Agent(prompt="Choose among {first} and {second}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        first = await agents.writer(question=task.prompt)
        second = await agents.writer(question=task.prompt)
        chosen = await agents.reader(first=first["answer"], second=second["answer"])
        return Outcome(answer=chosen["text"])


SCRIPT = {"writer": ["<ANSWER>12</ANSWER>", "thirteen – I think"], "reader": ["12 €"]}


def test_the_nth_call_of_an_agent_gets_the_nth_of_its_completions() -> None:
    trace = play_scripted(TwoTries(), TASK, SCRIPT)
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "12 €")
    assert [turn.completion_text for turn in trace.turns] == [*SCRIPT["writer"], "12 €"]
    assert [turn.is_format_ok for turn in trace.turns] == [True, False, True]
    assert trace.turns[0].prompt_text == "Compute 3 × 4"
    assert trace.turns[2].parents == (0, 1)


def test_completions_that_are_not_asked_for_are_ignored() -> None:
    trace = play_scripted(TwoTries(), TASK, {**SCRIPT, "reader": ["12", "never read"]})
    assert trace.answer == "12"


def test_a_call_without_completion_is_an_error() -> None:
    with pytest.raises(ValueError, match="agent 'writer' was called 2 times and has 1 completions"):
        play_scripted(TwoTries(), TASK, {**SCRIPT, "writer": ["<ANSWER>12</ANSWER>"]})


def test_completions_of_an_unknown_agent_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"completions of \['critic'\]: the workflow's agents are"):
        play_scripted(TwoTries(), TASK, {**SCRIPT, "critic": ["no"]})
