"""One agent of a team alone: it answers until the tokens are spent, the majority counts, and only the task is its input."""

from __future__ import annotations

import pytest
from plays import play

from serve_apps.authoring.agent import Agent
from serve_apps.episode.scripted import ByteTokenizer
from serve_apps.workflows.alone import Alone, task_input
from stores.types import Task

pytestmark = pytest.mark.fast

TASK = Task(task_id="t", prompt="1+2", answers=("3",))


def alone(budget_tokens: float, *, workflow: str = "alone_team:Team") -> Alone:
    return Alone(workflow, "solver", "answer", budget_tokens)


def answers(*values: str) -> dict[int, str]:
    return {i: f"<ANSWER>{value}</ANSWER>" for i, value in enumerate(values)}


def test_it_answers_until_the_tokens_are_spent_and_the_majority_counts() -> None:
    said = answers("7", "3", "3", "9", "9", "9")
    each = len(ByteTokenizer().encode_completion(said[0]))
    trace = play(alone(3 * each - 1), TASK, lambda agent, count, inputs: said[count])
    assert [turn.agent for turn in trace.turns] == ["solver"] * 3
    assert trace.answer == "3" and trace.outcome_metadata["votes"] == {"7": 1, "3": 2}
    assert all("1+2" in turn.prompt_text for turn in trace.turns)


def test_the_first_answer_is_always_given_and_the_first_of_equals_wins() -> None:
    said = answers("8", "3")
    assert len(play(alone(0), TASK, lambda agent, count, inputs: said[count]).turns) == 1
    budget = len(ByteTokenizer().encode_completion(said[0])) + 1
    both = play(alone(budget), TASK, lambda agent, count, inputs: said[count])
    assert len(both.turns) == 2 and both.answer == "8"


def test_an_answer_without_the_field_spends_tokens_and_has_no_vote() -> None:
    said = {0: "no idea", 1: "no idea", 2: "<ANSWER>3</ANSWER>"}
    budget = 2 * len(ByteTokenizer().encode_completion("no idea")) + 1
    trace = play(alone(budget), TASK, lambda agent, count, inputs: said[count])
    assert len(trace.turns) == 3 and trace.answer == "3"


def test_an_agent_that_reads_others_cannot_be_alone() -> None:
    with pytest.raises(
        ValueError, match="'checker' cannot solve a task alone: its prompt has the inputs draft, question"
    ):
        task_input("checker", Agent(prompt="{question} {draft}"))
    assert task_input("solver", Agent(prompt="Solve {question}")) == "question"
