"""shadowing: requests that the champion has answered -> copies for the candidate, whose replies no caller sees.

    gateway replica: Shadowing ── batches ──> Player: app `shadows-PORT`, at low priority ──> the candidate's policy apps
                               <── the result of each shadow request ──

The event loop of a gateway replica answers the champion's callers. Templates, tokenizing and model calls for shadow requests
would take its time, so it only passes the requests on, several at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import RunRequest
from stores.types import Trace

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 1.0
"""How long a shadow request waits for others: engines answer many at once with a fraction of the work."""
SLACK_S = 20.0
"""Time beyond the request timeout: by then the player itself reports the requests that are late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowJob:
    """A request that the champion has answered, to be answered by the candidate as well."""

    team: str
    team_version: int
    """The candidate's."""
    set_name: str
    request: ChatRequest | RunRequest
    task_id: str
    """The task of the champion's answer: both answers belong to one task."""
    is_kept: bool
    """Whether the trace of the candidate's answer is to be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowResult:
    """What happened to a shadow request."""

    outcome: Literal["answered", "failed", "late", "dropped"]
    """`late`: not answered in time, which is not held against a team whose engines run at low priority. `dropped`: there was
    no player, its candidate was another one, or the request says nothing of a team."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the answer: see figures.py."""
    trace: Trace | None = None
    is_trainable: bool = False


DROPPED = ShadowResult(outcome="dropped")


class Player(Protocol):
    """Answers shadow requests with the candidate."""

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        """Returns one result for each job, in order."""
        ...


class ServePlayer:
    """A Player over Ray Serve, in an app that may not be up yet."""

    def __init__(self, app: str, *, request_timeout_s: float) -> None:
        self._app, self._timeout_s = app, request_timeout_s + SLACK_S
        self._handle: Any = None

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        """See Player; the requests are dropped where the app does not answer."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async with asyncio.timeout(self._timeout_s):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(serve.get_app_handle, self._app)
                results: list[ShadowResult] = await self._handle.play_jobs.remote(jobs)
        except TimeoutError:
            return [ShadowResult(outcome="late")] * len(jobs)
        except (RayError, RayServeException) as error:
            self._handle = None
            logger.info("%d shadow requests are dropped: app %s raised %s", len(jobs), self._app, type(error).__name__)
            return [DROPPED] * len(jobs)
        return results


class Shadowing:
    """Collects shadow requests, passes them to a player in batches and reports each result. It lives in one event loop."""

    def __init__(self, player: Player | None, *, max_open: int, batch_wait_s: float = BATCH_WAIT_S) -> None:
        self._player, self._max_open, self._batch_wait_s = player, max_open, batch_wait_s
        self._num_open = 0
        self._waiting: list[tuple[ShadowJob, Callable[[ShadowResult], None]]] = []
        self._batches: set[asyncio.Task[None]] = set()
        """Keeps the tasks alive: the event loop itself holds weak references only."""

    def add(self, job: ShadowJob, on_result: Callable[[ShadowResult], None]) -> bool:
        """Takes a job and calls `on_result` once it has ended; returns False where `max_open` jobs are open already."""
        if self._num_open >= self._max_open:
            return False
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._batch_wait_s, self._send_batch)
        self._num_open += 1
        self._waiting.append((job, on_result))
        return True

    def _send_batch(self) -> None:
        batch, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._play_batch(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _play_batch(self, batch: list[tuple[ShadowJob, Callable[[ShadowResult], None]]]) -> None:
        jobs = [job for job, _ in batch]
        results = [DROPPED] * len(jobs)  # what is reported where there is no player, or it raises
        try:
            if self._player is not None:
                results = await self._player.play_jobs(jobs)
        finally:  # whatever happened, the jobs are no longer open and the candidate's set is no longer busy with them
            self._num_open -= len(jobs)
            for (_, on_result), result in zip(batch, results, strict=True):
                on_result(result)
