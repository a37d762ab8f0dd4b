"""controller_death: kill -9 of Serve's controller, and what the callers of a gateway see of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from ray import serve
from ray.exceptions import RayError
from waits import wait_until

from tests.chaos import victims

CONTROLLER = "ray::ServeController"
RECOVERY_S = 120.0


@dataclass
class Seen:
    """What callers got, all of them together."""

    answered_at: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def wait_for_more(self) -> None:
        """Returns after some more answers, or as soon as one has failed."""
        num = len(self.answered_at)
        wait_until(lambda: self.failed or len(self.answered_at) > num + 10)

    def __str__(self) -> str:
        gap = max((later - earlier for earlier, later in pairwise(sorted(self.answered_at))), default=0.0)
        return (
            f"{len(self.answered_at)} answered, {len(self.failed)} failed, longest time without an answer {gap:.1f} s"
        )


def kill_controller() -> None:
    """Kills the controller of the cluster that this process started, and waits until another has taken all apps over."""
    (old,) = victims.find(CONTROLLER, [os.getpid()])
    old.kill()
    wait_until(lambda: _is_followed(old.pid), timeout_s=RECOVERY_S)


def _is_followed(pid: int) -> bool:
    new = [found for found in victims.find(CONTROLLER, [os.getpid()]) if found.pid != pid]
    try:
        return bool(new) and all(app.status.value == "RUNNING" for app in serve.status().applications.values())
    except RayError:  # its actor is being started again
        return False


@contextmanager
def asked_all_the_time(requests: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Seen]:
    """A caller for each of these requests (URL, body), who asks again as soon as there is an answer."""
    seen, is_over = Seen(), threading.Event()

    def keep_asking(url: str, body: dict[str, Any]) -> None:
        with httpx.Client(timeout=90) as http:
            while not is_over.is_set():
                answer = http.post(url, json=body)
                if answer.status_code == 200:
                    seen.answered_at.append(time.monotonic())
                else:
                    seen.failed.append(answer.text)

    callers = [threading.Thread(target=keep_asking, args=request) for request in requests]
    for caller in callers:
        caller.start()
    try:
        yield seen
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
