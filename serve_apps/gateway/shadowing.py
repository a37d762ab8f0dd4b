"""shadowing: requests that the champion has answered -> the same ones for the candidate, answered elsewhere and told to nobody.

    gateway replica: Shadowing ── parcels ──> Player: app `shadows-PORT`, which stands back ──> the candidate's policy apps
                                 <── what became of each ──

One event loop answers the champion's callers. Templates, tokens and calls of shadows would take its time, so that it only
hands requests on, several at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from serve_apps.openai_api.protocol import ChatRequest, RunRequest
from stores.types import Trace

logger = logging.getLogger(__name__)

PARCEL_S = 1.0
"""How long a request waits for others to go with it: engines answer many at once with a fraction of the work."""
SLACK_S = 20.0
"""Beyond what a request may take: who plays it says by then that it was late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowJob:
    """A request that the champion has answered, for a candidate."""

    team: str
    team_version: int
    """The candidate's."""
    set_name: str
    request: ChatRequest | RunRequest
    task_id: str
    """Of the answered one: both are of one task."""
    is_kept: bool
    """Whether its trace is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a job."""

    outcome: Literal["answered", "failed", "late", "dropped"]
    """`late`: not done in time, which says nothing of a team whose engines stand back; `dropped`: nobody was there to play."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """See figures.py; of answers."""
    trace: Trace | None = None
    is_trainable: bool = False


class Player(Protocol):
    """Where candidates answer."""

    async def play(self, jobs: Sequence[ShadowJob]) -> list[Played]:
        """One for each job, in order."""
        ...


class Nobody:
    """A Player that drops everything."""

    async def play(self, jobs: Sequence[ShadowJob]) -> list[Played]:
        """See Player."""
        return [Played(outcome="dropped")] * len(jobs)


class ServePlayer:
    """A Player over Ray Serve: app `name`, which may not be up yet."""

    def __init__(self, name: str, *, request_timeout_s: float) -> None:
        self._name, self._timeout_s = name, request_timeout_s + SLACK_S
        self._handle: Any = None

    async def play(self, jobs: Sequence[ShadowJob]) -> list[Played]:
        """See Player."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async with asyncio.timeout(self._timeout_s):
                if self._handle is None:
                    self._handle = await asyncio.to_thread(serve.get_app_handle, self._name)
                played: list[Played] = await self._handle.play.remote(jobs)
        except TimeoutError:
            return [Played(outcome="late")] * len(jobs)
        except (RayError, RayServeException) as error:
            self._handle = None
            logger.info("%d shadows are dropped: %s says %s", len(jobs), self._name, type(error).__name__)
            return await Nobody().play(jobs)
        return played


class Shadowing:
    """Hands jobs on and says what became of them. Lives in one event loop."""

    def __init__(self, player: Player, *, max_open: int, parcel_s: float = PARCEL_S) -> None:
        self._player, self._max_open, self._parcel_s = player, max_open, parcel_s
        self._num_open = 0
        self._waiting: list[tuple[ShadowJob, Callable[[Played], None]]] = []
        self._parcels: set[asyncio.Task[None]] = set()

    def add(self, job: ShadowJob, ended: Callable[[Played], None]) -> bool:
        """Takes a job, whose end `ended` is told of; False where there is no room for it."""
        if self._num_open >= self._max_open:
            return False
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._parcel_s, self._send)
        self._num_open += 1
        self._waiting.append((job, ended))
        return True

    def _send(self) -> None:
        parcel, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._play(parcel))
        self._parcels.add(task)
        task.add_done_callback(self._parcels.discard)

    async def _play(self, parcel: list[tuple[ShadowJob, Callable[[Played], None]]]) -> None:
        jobs = [job for job, _ in parcel]
        played = await Nobody().play(jobs)
        try:
            played = await self._player.play(jobs)
        finally:  # their room and their set are free again, whatever happened
            self._num_open -= len(jobs)
            for (_, ended), of in zip(parcel, played, strict=True):
                ended(of)
