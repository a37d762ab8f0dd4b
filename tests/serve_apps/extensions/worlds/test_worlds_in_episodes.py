"""Worlds in episodes: what is recorded, what is played again, and whose fault it is where a world fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import one_group
import pytest
from one_group import saying

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.environment import Environment
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.demonstrate import demonstrate
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import Script
from serve_apps.extensions.worlds.workers import workers_of
from stores.traces.rows import episode_table, traces_of
from stores.types import Cause, EpisodeStatus, Task, Trace

pytestmark = pytest.mark.test
HERE = str(Path(__file__).parent)


class Walk(Workflow):
    """A guide says what to do, a walker does it."""

    guide = Agent(prompt="Task: {task}", contract=Tags("GOAL"))
    walker = Agent(prompt="Goal: {goal}\nSee: {see}", contract=Tags("ACT"))

    def __init__(self, world: str = "Corridor", steps_after_end: int = 0, **settings: Any) -> None:
        self.environments = {"way": Environment(f"odd_worlds:{world}", paths=(HERE,), **settings)}
        self.steps_after_end = steps_after_end

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        goal = (await agents.guide(task=task.prompt))["goal"]
        async with tools.way(**task.metadata) as way:
            while not way.seen.is_done:
                await way.step((await agents.walker(goal=goal, see=way.seen.text))["act"])
            for _ in range(self.steps_after_end):
                await way.step("walk")
            return Outcome(answer=str(way.total_reward), stop_reason=way.stop_reason)


def play(
    workflow: Workflow,
    says: Callable[[AgentCall], str],
    *,
    script: Script | None = None,
    settings: dict[str, Any] | None = None,
    max_attempts: int = 1,
) -> Trace:
    task = Task(task_id="t", prompt="to the end", answers=(), metadata=settings or {})
    limits = EpisodeConfig(turn_timeout_s=5, episode_timeout_s=20, max_attempts=max_attempts)
    return one_group.play(workflow, saying(says), task=task, limits=limits, script=script)


def walks(call: AgentCall) -> str:
    return "<GOAL>walk on and on</GOAL>" if call.agent == "guide" else "<ACT>walk</ACT>"


def test_every_step_is_an_event_with_the_turn_that_acted_and_the_next_turn_has_read_it() -> None:
    trace = play(Walk(), walks, settings={"length": 2})
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "1.0", "world_over")
    assert [turn.turn_index for turn in trace.turns] == [0, 2, 4]
    reset, first, second = trace.tool_calls
    assert (reset.call_index, reset.request) == (1, {"world": 0, "reset": {"length": 2}})
    assert (first.call_index, first.request, first.parents) == (3, {"world": 0, "step": "walk"}, (2,))
    assert (second.call_index, second.parents) == (5, (4,))
    assert second.response == {
        "text": "You have walked 2 of 2.",
        "reward": 0.5,
        "is_done": True,
        "info": {"done": 2},
        "anchor": second.response["anchor"],
    }
    assert [turn.parents for turn in trace.turns] == [(), (0, 1), (0, 3)]
    (stored,) = traces_of(episode_table([trace]).to_batches()[0])
    assert stored.tool_calls == trace.tool_calls


def test_the_anchor_names_the_state_and_an_action_without_effect_leaves_it() -> None:
    actions = iter(["walk", "sing", "sing", "walk", "walk"])

    def says(call: AgentCall) -> str:
        return "<GOAL>g</GOAL>" if call.agent == "guide" else f"<ACT>{next(actions)}</ACT>"

    trace = play(Walk(), says)
    anchors = [call.response["anchor"] for call in trace.tool_calls]
    assert anchors[1] == anchors[2] == anchors[3], "nothing happened"
    assert len(set(anchors)) == 4


def test_a_world_ends_after_its_last_step() -> None:
    trace = play(Walk(max_steps=4), walks, settings={"length": 9})
    assert (trace.stop_reason, len(trace.tool_calls)) == ("max_steps", 5)
    late = play(Walk(steps_after_end=1), walks)
    assert (late.status, late.cause) == (EpisodeStatus.AGENT_ERROR, Cause.AUTHOR)
    assert "a step into the world 'way' after its end: ask `way.seen.is_done`" in late.error


def test_a_variant_plays_the_world_again_up_to_the_change_and_then_on() -> None:
    base = play(Walk(), walks)
    asked: list[str] = []

    def sings(call: AgentCall) -> str:
        asked.append(call.inputs["see"])
        return "<ACT>sing</ACT>" if len(asked) == 1 else "<ACT>walk</ACT>"

    script = Script(kind="counterfactual", agent="walker", base=base, changed_at=4)
    other = play(Walk(), sings, script=script)
    assert other.status is EpisodeStatus.OK, other.error
    assert asked[0] == "You have walked 1 of 3.", "the world got the action before the change"
    assert [call.request.get("step") for call in other.tool_calls] == [None, "walk", "sing", "walk", "walk"]
    assert other.tool_calls[-1].response["text"] == "You have walked 3 of 3."


def test_a_world_that_a_seed_does_not_decide_is_refused_in_variants() -> None:
    says = iter(["<GOAL>g</GOAL>", "<ACT>throw</ACT>", "<ACT>throw</ACT>", "<ACT>stop</ACT>"])
    base = play(Walk("Dice"), lambda call: next(says))
    assert base.status is EpisodeStatus.OK
    script = Script(kind="counterfactual", agent="walker", base=base, changed_at=4)
    other = play(Walk("Dice"), lambda call: "<ACT>stop</ACT>", script=script)
    assert (other.status, other.cause) == (EpisodeStatus.AGENT_ERROR, Cause.AUTHOR)
    assert "event 1: the world 'way' shows another text than in episode" in other.error
    assert "its settings and the actions so far must say all that it does; give it a seed" in other.error


def test_demonstrations_play_the_world_each_time_and_the_same_action_twice() -> None:
    team = one_group.team_in_one_group(Walk(), one_group.BYTES, max_model_len=256, max_tokens=32)
    task = Task(task_id="t", prompt="to the end", answers=(), metadata={"length": 3})
    traces = demonstrate(
        [task],
        team=team,
        demonstrator=lambda agent, task, inputs, rng: "<GOAL>g</GOAL>" if agent == "guide" else "<ACT>walk</ACT>",
        count=2,
        run_id="r",
        seed=0,
    )
    for trace in traces:
        shown = [call.response["text"] for call in trace.tool_calls][1:]
        assert shown == [f"You have walked {n} of 3." for n in (1, 2, 3)]


def test_info_that_is_long_is_not_recorded_and_the_workflow_has_it() -> None:
    class Listener(Walk):
        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            async with tools.way() as way:
                return Outcome(answer=str(len(way.seen.info["valid"])))

    trace = play(Listener("Talkative"), walks)
    assert trace.answer == "1000"
    assert trace.tool_calls[0].response["info"] == {"unrecorded_characters": 1000 * len('"go north", ') + 11}


def test_a_worker_that_fails_is_an_attempt_with_the_same_seed() -> None:
    trace = play(Walk("Dying"), walks, max_attempts=2)
    assert (trace.status, trace.cause, trace.attempt) == (EpisodeStatus.TOOL_ERROR, Cause.INFRASTRUCTURE, 2)
    assert "ended in step" in trace.error
    hangs = play(Walk("Hanging", step_timeout_s=0.5), lambda call: "<ACT>hang</ACT>")
    assert hangs.cause is Cause.INFRASTRUCTURE and "within 0.5 s" in hangs.error
    late = play(Walk("Hanging", reset_timeout_s=0.5, step_timeout_s=0.5), walks, settings={"hangs_in": "reset"})
    assert late.cause is Cause.INFRASTRUCTURE and "no answer to reset" in late.error


def test_an_episode_that_stands_in_line_for_a_worker_is_no_failure_of_the_policy() -> None:
    """Four episodes take 0.5 s each in one worker, and may take 1.2 s."""
    workflow = Walk("Hanging", is_isolated=True)
    acts: dict[str, Iterator[str]] = {}

    def says(call: AgentCall) -> str:
        if call.agent == "guide":
            return "<GOAL>g</GOAL>"
        return f"<ACT>{next(acts.setdefault(call.task.task_id, iter(('hang', 'stop'))))}</ACT>"

    async def play_all() -> list[Trace]:
        limits = EpisodeConfig(turn_timeout_s=1.2, episode_timeout_s=1.2, max_attempts=1)
        tasks = [Task(task_id=f"t{k}", prompt="wait", answers=(), metadata={"seconds": 0.5}) for k in range(4)]
        starts = (one_group.start(workflow, saying(says), task=task, limits=limits) for task in tasks)
        return list(await asyncio.gather(*starts))

    async def warm() -> None:  # a worker takes a second or two to begin
        async with workers_of(workflow.environments["way"]).session() as session:
            await session.reset({})

    asyncio.run(warm())
    traces = asyncio.run(play_all())
    assert [(trace.status, trace.error) for trace in traces] == [(EpisodeStatus.OK, "")] * 4


def test_what_a_world_raises_is_the_policys_and_what_it_answers_wrongly_its_authors() -> None:
    raised = play(Walk("Raising"), walks, settings={"place": "step"})
    assert (raised.status, raised.cause) == (EpisodeStatus.TOOL_ERROR, Cause.POLICY)
    assert raised.error == "tool 'way': KeyError: 'walk'"
    faults = {
        "nan": "returned what is no JSON in step",
        "none": "returned None: it must be a mapping",
        "no text": "returned text = None: it must be a string",
        "true": "returned reward = True: it must be a finite number",
        "word": "returned is_done = 'no': it must be true or false",
        "list": "returned info = [1]: it must be a mapping",
    }
    for kind, fault in faults.items():
        trace = play(Walk("Answering"), walks, settings={"kind": kind})
        assert (trace.status, trace.cause) == (EpisodeStatus.AGENT_ERROR, Cause.AUTHOR), kind
        assert fault in trace.error, trace.error
        assert trace.tool_calls[-1].error, "the call is in the trace, with its fault"


def test_environments_that_cannot_be_are_refused_with_the_fix() -> None:
    for settings, fault in {
        (): "give the dotted path of a class, or the `url`",
        (("factory", "House"),): "'House' is no dotted path: write package.module:Name",
        (("url", "host:8000"),): "'host:8000' is no URL of a server",
        (("factory", "a:B"), ("workers", 0)): "Environment.workers: 0 is less than 1",
        (("factory", "a:B"), ("step_timeout_s", 90.0)): "at most reset_timeout_s = 60",
    }.items():
        with pytest.raises(ValueError, match="Environment") as raised:
            Environment(**dict(settings))  # type: ignore[arg-type]
        assert fault in str(raised.value)
