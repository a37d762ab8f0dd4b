"""fair_lanes: work of several callers -> threads that take it in turns, so that a caller with much of it does not hold up the others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

CALLER: ContextVar[object] = ContextVar("caller", default="")
"""Whose request the work is of: the gateway sets it. Training has one caller."""


class FairLanes:
    """As many threads as the machine has cores. Each takes the oldest work of the caller who was served longest ago."""

    def __init__(self, name: str) -> None:
        """Args: name: prefix of the threads' names."""
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[object, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """By caller, who is next first."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has a thread do the work, and returns its future."""
        done: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(CALLER.get(), deque()).append((done, work))
        self._threads.submit(self._do_next)
        return done

    def _do_next(self) -> None:
        with self._lock:
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            done, work = own.popleft()
            if own:
                self._waiting[caller] = own
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for, as that of any pool
            done.set_exception(error)
