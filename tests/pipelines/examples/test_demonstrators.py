"""Demonstrators play the shipped workflows to their end, mostly in form, and leave room to improve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_group import team_in_one_group

from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.rule import CreditRule
from pipelines.examples.arithmetic import tasks as arithmetic
from pipelines.examples.made_up_facts import tasks as made_up_facts
from pipelines.examples.small_functions import tasks as small_functions
from pipelines.extensions.code_tasks.reflective_code import ReflectiveCode
from pipelines.extensions.paper_credit.code_progress import CodeProgress
from pipelines.extensions.paper_credit.search_progress import SearchProgress
from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.demonstrate import EPISODES_AT_ONCE, NUM_COMPARED, demonstrate
from serve_apps.extensions.graphs.declared import Declared
from serve_apps.extensions.paper_workflows.debate import Debate
from serve_apps.extensions.paper_workflows.hierarchical_search import HierarchicalSearch
from serve_apps.extensions.paper_workflows.iterative_search import IterativeSearch
from serve_apps.extensions.paper_workflows.pioneer_observer import PioneerObserver
from serve_apps.extensions.paper_workflows.single_agent import SingleAgent
from serve_apps.extensions.paper_workflows.solver_verifier import SolverVerifier
from stores.types import Task
from tests.algorithms.counting_house import tasks as counting_house
from tests.algorithms.counting_house.credit import CountingHouseCredit
from tests.algorithms.counting_house.workflow import CountingHouse

pytestmark = pytest.mark.test

GRAPHS = Path(__file__).parents[3] / "infra" / "graphs"
FACTS = {"documents": "pipelines.examples.made_up_facts.tasks:documents"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


def sums() -> list[Task]:
    return arithmetic.generate(seed=0, split="train", count=20, max_a=49, max_factor=6)


def facts(hops: str) -> list[Task]:
    return made_up_facts.generate(seed=0, split="train", count=20, hops=hops)


def graph(name: str) -> Callable[[], Workflow]:
    return lambda: Declared(str(GRAPHS / f"{name}.yaml"), {"retrieve": {"retriever": FACTS, "top_k": 1}})


CASES: list[Any] = [
    (SolverVerifier, arithmetic.demonstrate_loop, sums, OutcomeShare(metric="math")),
    (Debate, arithmetic.demonstrate_debate, sums, OutcomeShare(metric="math")),
    (lambda: Debate(decide="summarizer"), arithmetic.demonstrate_debate, sums, OutcomeShare(metric="math")),
    (
        CountingHouse,
        counting_house.demonstrate,
        lambda: counting_house.generate(seed=0, split="train", count=60),
        CountingHouseCredit(),
    ),
    (PioneerObserver, arithmetic.demonstrate_pair, sums, OutcomeShare(metric="math")),
    pytest.param(
        lambda: ReflectiveCode(sandbox={"wall": "none"}, max_rounds=2),
        small_functions.demonstrate,
        lambda: small_functions.generate(seed=0, split="train", count=20),
        CodeProgress(),
        marks=pytest.mark.nightly,
    ),
    (
        lambda: IterativeSearch(retriever=FACTS, top_k=1),
        made_up_facts.demonstrate_iterative,
        lambda: facts("both"),
        SearchProgress(),
    ),
    (
        lambda: HierarchicalSearch(retriever=FACTS, top_k=1),
        made_up_facts.demonstrate,
        lambda: facts("both"),
        OutcomeShare(),
    ),
    (lambda: SingleAgent(retriever=FACTS, top_k=1), made_up_facts.demonstrate_single, lambda: facts("both"), OutcomeShare()),
    *((graph(name), made_up_facts.demonstrate, lambda: facts("one"), OutcomeShare()) for name in (
        "decompose_answer", "decompose_evidence", "decompose_summarize", "rewrite_select")),
]  # fmt: skip


@pytest.mark.parametrize(("make", "player", "tasks", "rule"), CASES)
def test_a_team_is_played_with_room_to_improve(
    make: Callable[[], Workflow],
    player: Any,
    tasks: Callable[[], list[Task]],
    rule: CreditRule,
    tokenizer: ChatTokenizer,
) -> None:
    workflow = make()
    team = team_in_one_group(workflow, tokenizer, max_model_len=2048, max_tokens=128)
    traces = demonstrate(tasks(), team=team, demonstrator=player, count=60, run_id="r", seed=0)
    outcomes = [rule.assign_credit(trace).outcome for trace in traces]
    in_form = [turn.is_format_ok for trace in traces for turn in trace.turns]
    spoke = {turn.agent for trace in traces for turn in trace.turns}
    print(f"{workflow.__class__.__name__}: outcome {sum(outcomes) / 60:.2f}, form {sum(in_form) / len(in_form):.2f}")
    assert 0.1 < sum(outcomes) / 60 < 0.75
    assert 0.75 < sum(in_form) / len(in_form) < 1
    assert spoke == set(workflow.agents)


class Asks(Workflow):
    """Asks its tool twice for the same."""

    agent = Agent(prompt="{found}")

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tools = {"find": Tool(self._find)}

    async def _find(self, words: list[str]) -> dict[str, list[str]]:
        self.asked.append(words[0])
        return {"found": words}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        for _ in range(2):
            found = await tools.find(words=[task.prompt])
            found["found"].append("more")
        reply = await agents.agent(found=" ".join(found["found"]))
        return Outcome(answer=reply.text)


def test_a_tool_is_asked_once_for_the_same(tokenizer: ChatTokenizer) -> None:
    workflow = Asks()
    team = team_in_one_group(workflow, tokenizer, max_model_len=64, max_tokens=8)
    tasks, answers = sums()[:3], {}
    for _ in range(2):
        traces = demonstrate(
            tasks, team=team, demonstrator=lambda *_: "x", count=6, run_id="r", seed=0, answers=answers
        )
        assert [t.turns[0].prompt_text for t in traces] == [f"{task.prompt} more" for task in tasks * 2]
    assert set(workflow.asked) == {task.prompt for task in tasks}
    assert len(workflow.asked) == 3 + 2 * NUM_COMPARED, "the first known answers of each call are compared"
    assert workflow.tools["find"].function == workflow._find, "the workflow itself is as it was"


def test_a_tool_that_remembers_is_refused_whether_it_says_so_or_not(tokenizer: ChatTokenizer) -> None:
    class Counts(Asks):
        async def _find(self, words: list[str]) -> dict[str, list[str]]:
            self.asked.append(words[0])
            return {"found": [str(len(self.asked))]}

    declared = Asks()
    declared.tools = {"find": replace(declared.tools["find"], is_stateful=True)}
    for workflow in (Counts(), declared):
        team = team_in_one_group(workflow, tokenizer, max_model_len=64, max_tokens=8)
        with pytest.raises(
            ValueError, match=r"tool 'find' answers the same arguments differently: .* declare an Environment"
        ):
            demonstrate(sums()[:1], team=team, demonstrator=lambda *_: "x", count=1, run_id="r", seed=0)


def test_several_demonstrations_play_at_once_and_keep_their_order(tokenizer: ChatTokenizer) -> None:
    under_way, most = [0], [0]

    class Waits(Asks):
        async def _find(self, words: list[str]) -> dict[str, list[str]]:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            await asyncio.sleep(0.001 * int(words[0][0]))
            under_way[0] -= 1
            return {"found": words}

    team = team_in_one_group(Waits(), tokenizer, max_model_len=64, max_tokens=8)
    tasks = sums()
    traces = demonstrate(tasks, team=team, demonstrator=lambda *_: "x", count=20, run_id="r", seed=0)
    assert [trace.task.task_id for trace in traces] == [task.task_id for task in tasks]
    assert 1 < most[0] <= EPISODES_AT_ONCE


def test_a_demonstration_is_no_longer_than_its_agent_may_write(tokenizer: ChatTokenizer) -> None:
    team = team_in_one_group(Asks(), tokenizer, max_model_len=64, max_tokens=8)
    with pytest.raises(
        ValueError, match=r"agent 'agent' was to write \d+ tokens and may write 8: raise its max_tokens"
    ):
        demonstrate(sums()[:1], team=team, demonstrator=lambda *_: "x " * 20, count=1, run_id="r", seed=0)


def test_the_limits_of_episodes_hold_for_demonstrations(tokenizer: ChatTokenizer) -> None:
    class Waits(Asks):
        async def _find(self, words: list[str]) -> dict[str, list[str]]:
            await asyncio.sleep(5)
            return {"found": words}

    team = team_in_one_group(Waits(), tokenizer, max_model_len=64, max_tokens=8)
    with pytest.raises(ValueError, match=r"no end after 0\.\d s"):
        demonstrate(
            sums()[:1],
            team=team,
            demonstrator=lambda *_: "x",
            count=1,
            run_id="r",
            seed=0,
            limits=EpisodeConfig(episode_timeout_s=0.1, max_attempts=1),
        )
