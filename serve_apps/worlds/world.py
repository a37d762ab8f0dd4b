"""world: one world of an episode: `async with tools.home(seed=7) as home:` -> what it shows, step by step, recorded."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol, Self

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised, TracedText
from serve_apps.authoring.environment import Environment
from serve_apps.episode_clock import EpisodeClock
from serve_apps.own_loop import result_of
from serve_apps.worlds.seen import Seen, checked
from stores.extensions import extensions
from stores.types import FAMILY

Live = Callable[[], Awaitable[dict[str, Any]]]
Record = Callable[[Mapping[str, Any], Live], Awaitable[tuple[int, Mapping[str, Any]]]]
"""Makes a call to a world, records it and returns its number among the events and what the world showed."""
OVER, MAX_STEPS = "world_over", "max_steps"
"""Why a world ended: it said so, or it had `max_steps` actions."""


class Session(Protocol):
    """One world, wherever it lives."""

    async def reset(self, settings: Mapping[str, Any]) -> Any:
        """Begins it; returns what it shows."""

    async def step(self, action: str) -> Any:
        """Returns what it shows after an action."""


class World:
    """A world of one episode. It begins with the block `async with`, and is closed at its end."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        settings: Mapping[str, Any],
        record: Record,
        clock: EpisodeClock,
        held: set[World],
    ) -> None:
        """Args: name: what the workflow calls the environment. settings: JSON values, what the class or the server takes.

        clock: of the episode; it stands still while the world waits for a worker. held: the worlds that the episode has open.
        """
        self._clock, self._held = clock, held
        self._name, self._environment, self._record = name, environment, record
        # `tools.home(**task.metadata)` is how a world is opened, and a task's family is none of its settings.
        self._settings = {key: value for key, value in settings.items() if key != FAMILY}
        self._stack = AsyncExitStack()
        self._session: Session | None = None
        self.seen: Seen
        """What it showed last."""
        self.num_steps = 0
        self.total_reward = 0.0
        self.stop_reason = ""
        """Why it is over: `world_over` or `max_steps`; empty until then."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:  # closes the session of a world that does not begin
            # An episode that waits for one world and holds another could wait for itself: its time goes on.
            with nullcontext() if self._held else self._clock.is_current():
                self._session = session = await stack.enter_async_context(session_of(self._environment))
            self._held.add(self)
            stack.callback(self._held.discard, self)
            await self._call({"reset": self._settings}, lambda: session.reset(self._settings), before="")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def step(self, action: str) -> Seen:
        """Acts, and returns what the world shows then; it is over after `max_steps` actions at the latest.

        Raises ToolError where the world or its worker fails, and AuthorError for a step into a world that is over.
        """
        session = self._session
        if session is None or self.seen.is_done:
            raise AuthorError(
                f"a step into the world {self._name!r} after its end: ask `{self._name}.seen.is_done` before each step"
            )
        self.num_steps += 1
        seen = await self._call({"step": action}, lambda: session.step(str(action)), before=self.seen.anchor)
        self.total_reward += seen.reward
        return seen

    async def _call(self, request: Mapping[str, Any], live: Callable[[], Awaitable[Any]], *, before: str) -> Seen:
        async def answered() -> dict[str, Any]:
            with self._clock.is_current():
                shown = await live()
            answer = checked(shown, self._environment, before=before)
            is_last = self.num_steps >= self._environment.max_steps
            self.stop_reason = OVER if answer["is_done"] else MAX_STEPS if is_last else ""
            return {**answer, "is_done": bool(self.stop_reason)}

        index, answer = await self._record(request, answered)
        self.seen = Seen(
            text=TracedText.by(answer["text"], index),
            reward=answer["reward"],
            is_done=answer["is_done"],
            info=answer["info"],
            anchor=answer["anchor"],
        )
        return self.seen


@cache
def homes() -> Any:
    """Returns the module in which worlds live, which an extension names (`Extension.worlds`); ValueError where none does."""
    for extension in extensions():
        if extension.worlds:
            return import_module(extension.worlds)
    raise ValueError(
        "the extension `worlds` is not installed, in which worlds live: it comes with troupe-rl: install that again"
    )


def session_of(environment: Environment) -> AbstractAsyncContextManager[Session]:
    """Gives a world that has not begun yet; it is closed at the end of the block."""
    session: AbstractAsyncContextManager[Session] = homes().session_of(environment)
    return session


def try_servers(environments: Mapping[str, Environment]) -> None:
    """Raises ValueError at once where nothing answers at an address, for which an episode would wait as long as a world may take to begin."""
    for name, environment in environments.items():
        try:
            result_of(homes().reach(environment))
        except ToolFault as fault:
            raise ValueError(f"environment {name}: {fault}") from None


def try_environments(environments: Mapping[str, Environment]) -> list[str]:
    """Returns a line per environment. Raises ValueError with the name of the first whose world does not begin."""
    return [result_of(_tried(name, environment)) for name, environment in environments.items()]


async def _tried(name: str, environment: Environment) -> str:
    began = time.perf_counter()
    try:
        async with session_of(environment) as session:
            checked(await session.reset(dict(environment.example)), environment, before="")
    except (ToolFault, ToolRaised, AuthorError) as fault:
        raise ValueError(
            f"environment {name}: the tasks that were tried opened no world of it, and none begins with the settings example = "
            f"{dict(environment.example)} of its declaration: {fault}"
        ) from None
    return f"environment {name}: its example began in {time.perf_counter() - began:.1f} s"
