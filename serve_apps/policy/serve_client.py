"""serve_client: one GenerateRequest -> Completion, from the Serve app of its model group."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from serve_apps.config import CallConfig
from serve_apps.episode_clock import current_clock
from serve_apps.policy.call_queue import Call, CallQueue
from serve_apps.policy.client import CallCounts, RequestRefused
from stores.types import Completion, GenerateRequest


class ServeClient:
    """Implements PolicyClient over Ray Serve. It belongs to one event loop: make it where it is used."""

    def __init__(
        self,
        app_names: Mapping[str, str],
        call: CallConfig,
        *,
        capacity: Mapping[str, int] | None = None,
        open_app: Callable[[str], Any] | None = None,
        replica_timeout_s: float | None = None,
    ) -> None:
        """Makes the client; nothing is contacted yet.

        Args:
            app_names: Serve application of every model group.
            call: deadlines, attempts, coalescing.
            capacity: by application, the number of calls that may be under way at once; None: any number.
            open_app: application name -> streaming handle of `Policy.generate_batch`; default asks Serve.
            replica_timeout_s: how long a call waits for a replica where an app has none; it is not repeated then. None: for the
                call's timeout.
        """
        queues = {
            app: CallQueue(
                app,
                call,
                None if capacity is None else capacity[app],
                open_app or open_serve_app,
                replica_timeout_s=replica_timeout_s,
            )
            for app in set(app_names.values())
        }
        self._queues = {group: queues[app] for group, app in app_names.items()}
        self._numbers = itertools.count()

    @property
    def counts(self) -> CallCounts:
        """Returns what became of the calls until now, over all apps."""
        return sum((queue.counts for queue in set(self._queues.values())), CallCounts())

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion from the app of the request's model group, after at most `max_attempts` attempts.

        While it waits for an engine, here or there, the clock of the episode that asks stands still. How it is with a call that
        was sent is known at the next report of the replica, within `generation.PULSE_S`; until then the clock goes on.

        Raises:
            PolicyCallError: infrastructure failed at every attempt.
            ContextExhausted: prompt + max_tokens exceed the app's `max_model_len`.
            RequestRefused: the engine cannot run this request at all.
        """
        queue = self._queues.get(request.model_group)
        if queue is None:
            raise RequestRefused(f"no app for model group {request.model_group!r}; there are {sorted(self._queues)}")
        clock = current_clock()
        order = (time.perf_counter() if clock is None else clock.began, next(self._numbers))
        call = Call(request=request, answer=asyncio.get_running_loop().create_future(), clock=clock, order=order)
        queue.put(call)
        try:
            return await call.answer
        finally:
            call.begins()


def open_serve_app(app: str) -> Any:
    """Returns a streaming handle of the app's `generate_batch`; raises RayServeException if there is no such app."""
    from ray import serve

    return serve.get_app_handle(app).options(stream=True, method_name="generate_batch")
