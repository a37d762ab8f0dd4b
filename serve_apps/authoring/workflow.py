"""workflow: the class that a user subclasses. Agents and tools are class attributes, `run` is ordinary Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeVar

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.choices import Choice
from serve_apps.authoring.environment import Environment
from stores.by_name import construct
from stores.team_code import in_use, own_folders
from stores.types import Task, Trace

SCORE = "score"
"""The entry of an outcome's metadata that the credit rule `posted_score` pays: a number of 0 to 1, whoever wrote it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Describes how an episode ended, as the workflow sees it."""

    answer: str
    stop_reason: str = "finished"
    is_truncated: bool = False
    """True where the workflow stopped early, at a limit of rounds for example."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for credit rules and for readers of the trace; `score`, if it is there, is a number of 0 to 1."""
    error: str = ""
    """What went wrong although the episode came to its end; it is stored with the trace."""


class Workflow:
    """Defines the control flow among agents. Subclass it, declare `Agent`, `Tool` and `Environment` attributes, write `run`."""

    agents: Mapping[str, Agent] = MappingProxyType({})
    tools: Mapping[str, Tool] = MappingProxyType({})
    environments: Mapping[str, Environment] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        attributes = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls.agents = {name: value for name, value in attributes.items() if isinstance(value, Agent)}
        cls.tools = {name: value for name, value in attributes.items() if isinstance(value, Tool)}
        cls.environments = {name: value for name, value in attributes.items() if isinstance(value, Environment)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Plays one episode. Call `await agents.<name>(...)` and `await tools.<name>(...)`; every call is recorded. A world is
        opened by `async with tools.<name>(...) as world:`.

        `agents.episode` is the episode's `EpisodeSpec`: iteration, purpose, seed.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no run(task, agents, tools)")

    def preflight(self) -> list[str]:
        """Returns what the workflow uses of this machine, a line each; empty where it needs nothing.

        `troupe validate` and every collector call it before episodes are played. It raises an error where the machine lacks
        something that every episode needs.
        """
        return []

    def check_task(self, task: Task, place: str) -> None:
        """Raises ValueError, naming `place`, for a task that the workflow cannot play.

        `troupe validate` calls it for every task; `place` is the file and the row.
        """

    def check_request(self, task: Task) -> None:
        """Raises ValueError for a task that callers of the gateway may not give, or that the workflow cannot play.

        The gateway calls it before each run: what a caller got wrong is status 400, and no failure of the team. A workflow that reads
        metadata checks them in `check_task`; what it takes of its own task files and not of callers it refuses here.
        """
        self.check_task(task, "the task")

    retraced_agent: str = ""
    """An agent whose turns a warm start writes into episodes in which it did not act, by `retraced`; empty: there is none."""

    def retraced(self, trace: Trace, *, team: Any, run_id: str, seed: int) -> Trace:
        """Returns an episode as `retraced_agent` would have led it, as a demonstration; AuthorError where it could not have.

        Args: team: the `ActingTeam` that this workflow is of.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no retraced(trace, ...)")

    @property
    def prompts(self) -> dict[str, str]:
        """The system and user templates of every agent, and what a choice says of its options, for the team manifest."""
        return {name: "\n---\n".join(filter(None, _texts_of(agent))) for name, agent in self.agents.items()}

    @property
    def prompts_sha256(self) -> str:
        """The hash that identifies the prompts."""
        return sha256(json.dumps(self.prompts, sort_keys=True).encode()).hexdigest()


def _texts_of(agent: Agent) -> list[str]:
    choice = agent.contract
    further = [json.dumps([choice.options, choice.ask])] if isinstance(choice, Choice) else []
    return [agent.system, agent.prompt, *further]


async def together(*calls: Awaitable[T]) -> list[T]:
    """Awaits these calls side by side and returns their results in order. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def load_carried(code: Mapping[str, str], path: str, settings: Mapping[str, Any]) -> Workflow:
    """Makes the workflow of a team by the code that it carries (empty: by the modules of this process); fails as `load_workflow` does."""
    with in_use(code):
        return load_workflow(path, settings)


def load_workflow(path: str, settings: Mapping[str, Any]) -> Workflow:
    """Makes the workflow that a run config names.

    ValueError or OSError whatever its modules raise: they are the user's, and other teams of the process go on.
    """
    workflow = construct(
        path, settings, place="workflow", wanted="a subclass of serve_apps.Workflow", fits=_is_workflow
    )
    assert isinstance(workflow, Workflow)
    if not workflow.agents:
        raise ValueError(f"workflow.path: {path!r} declares no Agent: as a class attribute, or in its constructor")
    names = workflow.agents.keys() | workflow.tools.keys() | workflow.environments.keys()
    if taken := sorted(names & {"episode", "recorder"}):
        raise ValueError(
            f"workflow.path: {path!r} declares {taken[0]!r}, a name that `agents` and `tools` have for the episode themselves: call it "
            "something else"
        )
    if folders := own_folders():
        workflow.environments = {
            name: replace(kind, paths=(*kind.paths, *folders)) for name, kind in workflow.environments.items()
        }
    return workflow


def _is_workflow(named: Any) -> bool:
    return isinstance(named, type) and issubclass(named, Workflow)
