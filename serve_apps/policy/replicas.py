"""replicas: an app, a method -> the answer of each of its replicas.

While Serve hands a new `user_config` to a replica, for about 0.1 s, no handle lists it, though it goes on answering: a
broadcast at that moment reaches too few replicas, or none.
"""

from __future__ import annotations

import time
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

REPLICA_TIMEOUT_S = 30.0
"""How long one replica may take to answer a status or a probe."""
POLL_S = 0.05


def handle_of(app: str) -> Any:
    """Returns the Serve handle of an app's one deployment."""
    return serve.get_app_handle(app)


def statuses_of(app: str, *, timeout_s: float, without_late: bool = False) -> list[dict[str, Any]]:
    """Returns the `status()` of every replica that is up; empty where there is no such app.

    Raises TimeoutError where one is too busy to answer in time. Args: without_late: leave it out instead.
    """
    try:
        answers = handle_of(app).broadcast("status").results(timeout_s=timeout_s, return_exceptions=True)
    except (RayError, RayServeException):
        return []
    num_late = sum(isinstance(answer, TimeoutError) for answer in answers)
    if num_late and not without_late:
        raise TimeoutError(
            f"{num_late} of {len(answers)} replicas of app {app!r} did not answer 'status' in {timeout_s:g} s"
        )
    return [answer for answer in answers if isinstance(answer, dict)]


def statuses_if_up(app: str) -> list[dict[str, Any]]:
    """Returns the `Policy.statuses()` of the replicas that answer, one per model group; one that is being replaced is missing."""
    try:
        answers = handle_of(app).broadcast("statuses").results(timeout_s=REPLICA_TIMEOUT_S, return_exceptions=True)
    except (RayError, RayServeException):
        return []
    return [status for statuses in answers if isinstance(statuses, list) for status in statuses]


class Broadcast:
    """Calls every replica of an app. The call begins at once, so that several apps can be asked side by side."""

    def __init__(self, app: str, method: str, *args: Any) -> None:
        self._app, self._method, self._args = app, method, args
        self._sent = handle_of(app).broadcast(method, *args)

    def answers(self, num_replicas: int, *, timeout_s: float = REPLICA_TIMEOUT_S) -> list[Any]:
        """Returns one answer of each replica, at least `num_replicas`; asks again where fewer were on the list.

        Raises TimeoutError when there were fewer for `timeout_s`, and what a replica raises.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                received: list[Any] = self._sent.results(timeout_s=max(REPLICA_TIMEOUT_S, timeout_s))
            except DeploymentUnavailableError:
                received = []
            if len(received) >= num_replicas:
                return received
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(received)} of {num_replicas} replicas of app {self._app!r} answered {self._method!r} in {timeout_s:g} s"
                )
            time.sleep(POLL_S)
            self._sent = handle_of(self._app).broadcast(self._method, *self._args)
