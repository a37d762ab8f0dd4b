"""episode_resources: what a tool keeps for one episode, a session with a server for example -> closed when the attempt ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar


class Resource(Protocol):
    """Something that an episode holds."""

    def close(self) -> None:
        """Ends it, without waiting."""
        ...


R = TypeVar("R", bound=Resource)
_held: ContextVar[dict[Hashable, Resource]] = ContextVar("held")


@contextmanager
def episode_resources() -> Iterator[None]:
    """Closes at its end what was made inside by `of_episode`, also in tasks that were begun inside."""
    held: dict[Hashable, Resource] = {}
    token = _held.set(held)
    try:
        yield
    finally:
        _held.reset(token)
        for resource in held.values():
            resource.close()


def of_episode(key: Hashable, make: Callable[[], R]) -> R:
    """Returns the episode's resource of that key, which the first call makes; RuntimeError outside an episode."""
    held = _held.get(None)
    if held is None:
        raise RuntimeError("no episode is being played here: only a workflow's calls have a session per episode")
    if key not in held:
        held[key] = make()
    resource: R = held[key]  # type: ignore[assignment]
    return resource
