"""waiting: what a stage waits for, said where it waits and read by its watchdog (pipelines/run/watchdog.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Wait = str | Callable[[], str]
"""In words, or how to say it now; called from another thread, so it must neither block nor change anything."""

_WAITS: ContextVar[list[Wait] | None] = ContextVar("waits", default=None)


@contextmanager
def waiting(what: Wait) -> Iterator[None]:
    """Says what is waited for inside; costs nothing and does nothing where nobody watches."""
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
    """Has the waits of this thread show up in `waits`, outermost first."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)
