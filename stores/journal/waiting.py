"""waiting: lets code say what it waits for, so that a stage's watchdog can report it (pipelines/run/watchdog.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Wait = str | Callable[[], str]
"""A text, or a function that returns it; it is called from another thread, so it must neither block nor change anything."""

_WAITS: ContextVar[list[Wait] | None] = ContextVar("waits", default=None)


@contextmanager
def waiting(what: Wait) -> Iterator[None]:
    """Declares what is waited for inside; it does nothing where no watchdog reads it."""
    waits = _WAITS.get()
    if waits is None:
        yield
        return
    waits.append(what)
    try:
        yield
    finally:
        waits.pop()


@contextmanager
def collected(waits: list[Wait]) -> Iterator[None]:
    """Collects the waits of this thread in `waits`, outermost first."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)
