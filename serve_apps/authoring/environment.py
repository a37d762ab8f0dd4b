"""environment: a kind of world, as the author of a workflow declares it beside agents and tools.

    class Home(Workflow):
        home = Environment("my_worlds:House", workers=2)

        async def run(self, task, agents, tools):
            async with tools.home(**task.metadata) as home:
                while not home.seen.is_done:
                    await home.step((await agents.actor(see=home.seen.text))["act"])

A world is its settings and the actions so far. What plays an episode again opens the world anew and repeats the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stores.types import Cause


@dataclass(frozen=True)
class Environment:
    """Declares a kind of world: a class whose worlds live in worker processes, or an OpenEnv server.

    The class is called with the settings of a world. It has `reset()` and `step(action)`, which return a mapping with `text` and,
    as far as they differ from the defaults, `reward` (0.0), `is_done` (false), `info` ({}, JSON values) and `anchor`; and it may have
    `close()`. An action that means nothing is data: the text says so. What a world raises in `step` ends the episode as
    an error of its policy; a worker that hangs or dies is a fault of the infrastructure, and the episode is repeated, as after
    an exception with an attribute `is_infrastructure` that is true.
    """

    factory: str = ""
    """Dotted path of the class, `package.module:Name`, as the workers import it."""
    workers: int = 1
    """Worker processes of each process that plays episodes. A worker takes one step at a time."""
    python: str = ""
    """Interpreter of the workers, in a virtual environment of its own where what a world needs does not fit Troupe's; empty: Troupe's."""
    paths: tuple[str, ...] = ()
    """Folders that a worker looks for modules in first."""
    is_isolated: bool = False
    """Whether a worker holds one world at a time, because worlds in one process disturb each other or may take it with them."""
    reset_timeout_s: float = 60.0
    """Seconds for `reset`. The first one of a worker waits for its imports, too."""
    step_timeout_s: float = 30.0
    timeout_cause: Literal[Cause.INFRASTRUCTURE, Cause.POLICY] = Cause.INFRASTRUCTURE
    """Whose fault a step beyond its limit is: the policy's in a world that an action can make compute for ever."""
    memory_mib: int = 4096
    """Memory of a worker with its children; beyond it the worker is ended."""
    max_steps: int = 50
    """Actions after which a world is over."""
    max_info: int = 4096
    """Characters of `info`, as JSON, that the trace keeps; the record of a longer one says its length only."""
    unchanged: tuple[str, ...] = ("Nothing happens.",)
    """Texts by which a world says that an action did nothing: its state, and so its anchor, is the one before."""
    url: str = ""
    """An OpenEnv server (`http://host:port`) instead of workers."""
    action_field: str = "text"
    """Where an OpenEnv server reads the action."""
    text_field: str = "text"
    """Where an OpenEnv server's observation has its text."""
    example: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Settings of the world that `troupe validate` begins where the tasks that it plays open none."""

    def __post_init__(self) -> None:
        if bool(self.factory) == bool(self.url):
            raise ValueError("Environment: give the dotted path of a class, or the `url` of an OpenEnv server")
        if self.factory and not all(self.factory.partition(":")[::2]):
            raise ValueError(f"Environment: {self.factory!r} is no dotted path: write package.module:Name")
        if self.url and not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"Environment: {self.url!r} is no URL of a server: write http://host:port")
        for name in ("workers", "memory_mib", "max_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"Environment.{name}: {getattr(self, name)} is less than 1")
        if not 0 < self.step_timeout_s <= self.reset_timeout_s:
            raise ValueError(
                f"Environment: step_timeout_s = {self.step_timeout_s:g} must be above 0 and at most reset_timeout_s = "
                f"{self.reset_timeout_s:g}"
            )

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.url or self.factory
