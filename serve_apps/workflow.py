"""Workflow: what a user subclasses. Agents and tools are class attributes, `run` is ordinary Python."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeVar

from serve_apps.agent import Agent, Tool
from stores.types import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended, in the workflow's own words."""

    answer: str
    stop_reason: str = "finished"
    is_truncated: bool = False
    """True where the workflow itself gave up: a round limit, for example."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that credit rules or readers want to see."""


class Workflow:
    """Control flow among agents. Subclass it, declare `Agent` and `Tool` attributes, write `run`."""

    agents: Mapping[str, Agent] = MappingProxyType({})
    tools: Mapping[str, Tool] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        attributes = [(name, value) for base in reversed(cls.__mro__) for name, value in vars(base).items()]
        cls.agents = {name: value for name, value in attributes if isinstance(value, Agent)}
        cls.tools = {name: value for name, value in attributes if isinstance(value, Tool)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """One episode. Call `await agents.<name>(...)` and `await tools.<name>(...)`; everything is recorded.

        `agents.episode` says which episode it is (`EpisodeSpec`): iteration, purpose, seed.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no run(task, agents, tools)")

    def preflight(self) -> list[str]:
        """What this machine gives the workflow, a line each; empty where it needs nothing of it.

        Asked by `troupe validate` and by every collector before its episodes. Raises where the machine lacks something that
        no episode could do without.
        """
        return []

    @property
    def prompts(self) -> dict[str, str]:
        """System and user template of every agent, for the team manifest."""
        return {name: f"{a.system}\n---\n{a.prompt}" if a.system else a.prompt for name, a in self.agents.items()}

    @property
    def prompts_sha256(self) -> str:
        """Identity of the prompts."""
        return sha256(json.dumps(self.prompts, sort_keys=True).encode()).hexdigest()


async def together(*calls: Awaitable[T]) -> list[T]:
    """What these calls give, side by side, in their order. The first that fails ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def load_object(path: str, *, place: str) -> Any:
    """What `package.module:Name` names; ValueError with `place` and the fix where it does not import."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{place}: cannot import {module_name!r} ({error}): is it on PYTHONPATH?") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{place}: {module_name!r} has no {name!r}; it has {', '.join(public[:20])}") from None


def load_workflow(path: str, settings: Mapping[str, Any]) -> Workflow:
    """The workflow a run config names; ValueError where it does not import, is none or refuses its settings."""
    cls = load_object(path, place="workflow.path")
    if not (isinstance(cls, type) and issubclass(cls, Workflow)):
        raise ValueError(f"workflow.path: {path!r} is not a subclass of serve_apps.workflow.Workflow")
    try:
        workflow = cls(**settings)
    except TypeError as error:
        raise ValueError(f"workflow.settings: {path} does not take them: {error}") from None
    if not workflow.agents:
        raise ValueError(f"workflow.path: {path!r} declares no Agent: as a class attribute, or in its constructor")
    return workflow
