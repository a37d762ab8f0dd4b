"""plays: a workflow, a task and a function that says what an agent says -> the trace of the episode, and who spoke in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from serve_apps.authoring.workflow import Workflow
from serve_apps.episode.scripted import play_saying
from serve_apps.episode.team import AgentCall
from stores.types import Task, Trace

Say = Callable[[str, int, Mapping[str, str]], str]
"""(agent, how often it has spoken before, inputs) -> completion."""


def play(workflow: Workflow, task: Task, say: Say, **settings: Any) -> Trace:
    """Args: settings: those of `play_saying`."""
    spoken = Counter[str]()

    def said(call: AgentCall) -> str:
        spoken[call.agent] += 1
        return say(call.agent, spoken[call.agent] - 1, call.inputs)

    return play_saying(workflow, task, said, **settings)


def agents_of(trace: Trace) -> list[str]:
    """The agents and tools that were called, in order."""
    events = {t.turn_index: t.agent for t in trace.turns} | {c.call_index: c.tool for c in trace.tool_calls}
    return [events[i] for i in sorted(events)]
