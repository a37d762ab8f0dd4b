"""Replays: what came before the change is what was recorded, token for token; what comes after it is played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import one_group
import pytest
from one_group import saying

from serve_apps.authoring.agent import Agent, Tool, ToolFault
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow, together
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import Script
from stores.traces.rows import episode_table, traces_of
from stores.types import Completion, EpisodeStatus, Task, Trace

pytestmark = pytest.mark.fast

INK = Task(task_id="t", prompt="ink", answers=())
looked_up: list[str] = []


async def _look_up(word: str) -> str:
    looked_up.append(word)
    return f"entry {len(looked_up)} of {word}"


SEARCH_IS_DOWN = threading.Event()


async def _search(word: str) -> str:
    if SEARCH_IS_DOWN.is_set():
        raise ToolFault("503")
    return f"much on {word}"


class Editors(Workflow):
    """Two drafts, an entry looked up after each, and a judge."""

    writer = Agent(prompt="Write on {topic} after {notes}", contract=Tags("TEXT"))
    judge = Agent(prompt="Judge {text}", contract=Tags("TEXT"))
    look_up = Tool(_look_up, timeout_s=1)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """What the judge says."""
        notes = "nothing"
        for _ in range(2):
            draft = await agents.writer(topic=task.prompt, notes=notes)
            notes = await tools.look_up(word=draft["text"])
        final = await agents.judge(text=notes)
        return Outcome(answer=final["text"])


def play(
    word: str,
    *,
    script: Script | None = None,
    calls: list[AgentCall] | None = None,
    tools: Mapping[str, Tool] | None = None,
) -> Trace:
    """Every agent says the word. Args: calls: takes what the engine was asked."""
    workflow = Editors()
    if tools is not None:
        workflow.tools = tools

    def says(call: AgentCall) -> str:
        if calls is not None:
            calls.append(call)
        return f"<TEXT>{word}</TEXT>"

    return one_group.play(workflow, saying(says), task=INK, script=script)


def test_a_counterfactual_asks_the_engine_from_the_changed_turn_on_only() -> None:
    looked_up.clear()
    base = play("old")
    calls: list[AgentCall] = []
    script = Script(kind="counterfactual", agent="writer", base=base, changed_at=2)
    other = play("new", script=script, calls=calls)
    assert [call.agent for call in calls] == ["writer", "judge"], "the first draft is replayed"
    assert [t.turn_index for t in other.turns] == [t.turn_index for t in base.turns] == [0, 2, 4]
    first, again = base.turns[0], other.turns[0]
    assert list(first.completion_token_ids) == list(again.completion_token_ids)
    assert list(first.rollout_logprobs) == list(again.rollout_logprobs)
    assert list(base.turns[1].prompt_token_ids) == list(other.turns[1].prompt_token_ids)
    assert other.turns[1].seed != base.turns[1].seed
    assert looked_up == ["old", "old", "new"], "the tool's first answer is the recorded one"
    assert other.tool_calls[0].response == base.tool_calls[0].response == "entry 1 of old"
    assert (other.answer, other.variant) == ("new", "counterfactual-2")
    assert other.episode_id != base.episode_id and other.group_id != base.group_id


def test_an_agent_that_is_left_out_says_nothing_and_the_others_play_on() -> None:
    base = play("old")
    calls: list[AgentCall] = []
    script = Script(kind="without", agent="writer", base=base, changed_at=0)
    other = play("new", script=script, calls=calls)
    assert [call.agent for call in calls] == ["judge"]
    assert [len(turn.completion_token_ids) for turn in other.turns[:2]] == [0, 0]
    assert (other.status, other.answer, other.variant) == (EpisodeStatus.OK, "new", "without-writer")


def test_a_greedy_episode_is_sampled_without_chance() -> None:
    calls: list[AgentCall] = []
    trace = play("new", script=Script(kind="greedy"), calls=calls)
    assert {call.request.sampling.temperature for call in calls} == {0.0}
    assert {turn.sampling.temperature for turn in trace.turns} == {0.0} and trace.variant == "greedy"


def test_a_workflow_that_asks_something_else_has_gone_astray() -> None:
    looked_up.clear()
    base = play("old")
    astray = Trace(**{name: getattr(base, name) for name in Trace.__dataclass_fields__} | {"tool_calls": ()})
    script = Script(kind="counterfactual", agent="judge", base=astray, changed_at=4)
    other = play("new", script=script)
    assert other.status is EpisodeStatus.AGENT_ERROR
    assert "turn 2 of 'writer' has another prompt" in other.error


class Branches(Workflow):
    """Two branches side by side; a tool that may be down."""

    solver = Agent(prompt="Solve by way {way}", contract=Tags("TEXT"))
    verifier = Agent(prompt="Check {draft}", contract=Tags("TEXT"))
    search = Tool(_search, fail_open=True, fallback="nothing found")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        async def branch(way: str) -> str:
            draft = await agents.solver(way=way)
            return str((await agents.verifier(draft=draft["text"]))["text"])

        found = [f"{word}: {await tools.search(word=word)}" for word in ("one", "two")]
        answers = await together(*map(branch, found))
        return Outcome(answer=" ".join(answers))


def play_branches(*, is_slow: bool, script: Script | None = None) -> Trace:
    """Plays them; in the record the first branch is slower."""

    def says(call: AgentCall) -> str:
        if call.agent == "solver":
            return f"<TEXT>{call.inputs['way'][:3]}</TEXT>"
        return f"<TEXT>{'old' if is_slow else 'new'} {call.inputs['draft']}</TEXT>"

    async def complete(call: AgentCall) -> Completion:
        if is_slow and call.inputs.get("way", "").startswith("one"):
            await asyncio.sleep(0.2)
        return await saying(says)(call)

    return one_group.play(Branches(), complete, task=INK, script=script)


def test_branches_that_come_in_another_order_are_those_of_the_record() -> None:
    SEARCH_IS_DOWN.set()
    base = play_branches(is_slow=True)
    drafts = [turn.prompt_text for turn in base.turns if turn.agent == "verifier"]
    assert drafts == ["Check two", "Check one"] and "nothing found" in base.turns[0].prompt_text
    SEARCH_IS_DOWN.clear()  # what failed in the record fails again
    for changed in (turn for turn in base.turns if turn.agent == "verifier"):
        script = Script(kind="counterfactual", agent="verifier", base=base, changed_at=changed.turn_index)
        other = play_branches(is_slow=False, script=script)
        assert (other.status, other.error) == (EpisodeStatus.OK, "")
        texts = {turn.round_index: turn for turn in other.turns if turn.agent == "verifier"}
        same = texts[changed.round_index]
        assert list(same.prompt_token_ids) == list(changed.prompt_token_ids)
        assert same.completion_text.startswith("<TEXT>new")


def test_a_tool_that_remembers_is_refused_where_an_episode_is_played_again() -> None:
    base = play("old")
    remembering = {"look_up": replace(Editors.tools["look_up"], is_stateful=True)}
    for kind, status in (("counterfactual", EpisodeStatus.AGENT_ERROR), ("greedy", EpisodeStatus.OK)):
        script = Script(kind=kind, agent="writer", base=None if kind == "greedy" else base, changed_at=2)
        other = play("new", script=script, tools=remembering)
        assert other.status is status
        assert ("tool 'look_up' remembers its calls" in other.error) == (status is EpisodeStatus.AGENT_ERROR)


class Looks(Workflow):
    """Gives its tool what JSON has in another form."""

    writer = Agent(prompt="Write of {found}", contract=Tags("TEXT"))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        found = await tools.look(at=(1, 2), words={3: "three"})
        draft = await agents.writer(found=found)
        final = await agents.writer(found=draft["text"])
        return Outcome(answer=final["text"])


def test_a_stored_call_is_the_call_that_was_made_whatever_json_made_of_its_arguments() -> None:
    looks: list[Any] = []

    async def look(at: tuple[int, int], words: dict[int, str]) -> str:
        looks.append((at, words))
        return f"look {len(looks)}"

    workflow = Looks()
    workflow.tools = {"look": Tool(look)}
    base = one_group.play(workflow, saying(lambda call: "<TEXT>old</TEXT>"), task=INK)
    (stored,) = traces_of(episode_table([base]).to_batches()[0])
    for trace in (base, stored):
        script = Script(kind="counterfactual", agent="writer", base=trace, changed_at=base.turns[1].turn_index)
        other = one_group.play(workflow, saying(lambda call: "<TEXT>new</TEXT>"), task=INK, script=script)
        assert (other.error, other.answer, other.tool_calls[0].response) == ("", "new", "look 1")
    assert looks == [((1, 2), {3: "three"})]


class GivesUp(Workflow):
    """Gives a call up and repeats it."""

    writer = Agent(prompt="Write {word}", contract=Tags("TEXT"))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await agents.writer(word=task.prompt)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await agents.writer(word="twice")
        await agents.writer(word="twice")
        return Outcome(answer="")


def test_a_call_that_was_given_up_has_its_seed_when_it_is_repeated_also_where_an_episode_is_played_again() -> None:
    def played(script: Script | None = None) -> tuple[Trace, list[int]]:
        seeds: list[int] = []

        async def complete(call: AgentCall) -> Completion:
            if call.inputs["word"] == "twice":
                seeds.append(call.request.seed)
                await asyncio.sleep(5 if len(seeds) == 1 else 0)
            return await saying(lambda call: "<TEXT>so</TEXT>")(call)

        return one_group.play(GivesUp(), complete, task=INK, script=script), seeds

    base, seeds = played()
    again, seeds_again = played(Script(kind="counterfactual", agent="writer", base=base, changed_at=1))
    for trace, (given_up, repeated) in ((base, seeds), (again, seeds_again)):
        assert (trace.error, [turn.round_index for turn in trace.turns]) == ("", [0, 1])
        assert given_up == repeated
