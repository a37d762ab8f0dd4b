"""capture: answers that may be kept -> the team's store of served episodes, in batches; and what callers say of them.

    answer ── consent, share ──> redaction ──> pending ── every flush_s, in a thread ──> stores/served.py

Nobody waits for a write: an answer that finds no room is not kept and counted as dropped, and a store that is down costs
the episodes that wait, never a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from serve_apps.config import CaptureConfig
from serve_apps.gateway.api_keys import ApiKey
from serve_apps.gateway.redaction import Redaction
from serve_apps.gateway.teams import ServedTeam, TeamStores
from serve_apps.openai_api.protocol import ApiError, FeedbackRequest
from stores.served import Feedback, ServedStore
from stores.types import SERVED, Trace

logger = logging.getLogger(__name__)

Kept = Literal["kept", "redacted", "dropped"]
"""What became of an episode that may be kept."""

RETENTION_S = 3600.0
"""Between two looks for what is too old."""
BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An episode on its way into a store."""

    uri: str
    trace: Trace
    feedback: Feedback | None
    """What its caller thought of it from the first."""


class Capture:
    """Lives in one event loop, in which its writer begins with the first episode; `close` it at the end."""

    def __init__(self, config: CaptureConfig, *, count: Callable[[str, int], None]) -> None:
        """Args: count: is told of episodes by what became of them: kept, redacted, dropped, failed; and of feedback."""
        self._config, self._count = config, count
        self._redaction = Redaction(config.redact)
        self._pending: deque[Pending] = deque()
        self._writing: list[Pending] = []
        self._stores: dict[str, ServedStore] = {}
        self._num_allowed = 0
        self._writer: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self._looked_at: dict[str, float] = {}

    def wants(self, store: bool | None) -> bool:
        """Whether an answer is kept whose request said `store` so; one in 1 / share of those that may be."""
        is_allowed = store is True or (store is None and self._config.consent == "given")
        if not is_allowed or not self._config.share:
            return False
        n, share = self._num_allowed, self._config.share
        self._num_allowed += 1
        return int((n + 1) * share) > int(n * share)

    def keep(
        self,
        stores: TeamStores | None,
        trace: Trace,
        *,
        team: ServedTeam,
        key: ApiKey,
        is_trainable: bool,
        score: float | None = None,
    ) -> Kept:
        """Takes an episode, without what must not be kept; says what became of it.

        Args: score: the caller's feedback on it, -1 to 1, if it is known already.
        """
        if stores is None or len(self._pending) >= self._config.max_pending:
            self._count("dropped", 1)
            return "dropped"
        redacted = self._redaction.of(trace)
        about = {
            "team": team.name,
            "team_version": team.version,
            "arm": team.arm,
            "key": key.name,
            "is_trainable": is_trainable and redacted is None,
        }
        found = redacted or trace
        kept = replace(found, outcome_metadata={**found.outcome_metadata, SERVED: about})
        said = None
        if score is not None:
            said = Feedback(trace_id=trace.episode_id, key=key.name, at=time.time(), score=score)
        self._pending.append(Pending(uri=stores.served, trace=kept, feedback=said))
        became: Kept = "redacted" if redacted else "kept"
        self._count(became, 1)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_on())
        return became

    async def close(self) -> None:
        """Writes what waits, and ends."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})
            await self._flush()

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(self._config.flush_s)
            await asyncio.shield(self._flush())

    async def judge(self, uris: list[str], trace_id: str, feedback: FeedbackRequest, key: ApiKey) -> Feedback:
        """Stores what a caller thinks of an answer that it got; ApiError 404 where it got none of that id that is kept."""
        uri = await self._place_of(uris, trace_id, key)
        said = Feedback(trace_id=trace_id, key=key.name, at=time.time(), **feedback.model_dump())
        given = self._redaction.clean(said)
        await asyncio.to_thread(self._store(uri).write_feedback, given)
        self._count("feedback", 1)
        return given

    async def _place_of(self, uris: list[str], trace_id: str, key: ApiKey) -> str:
        for _ in range(2):  # another replica may be about to write it
            waiting = [*self._pending, *self._writing]
            found = [(p.uri, p.trace) for p in waiting if p.trace.episode_id == trace_id]
            found += [(u, t) for u in uris if (t := await asyncio.to_thread(self._stored, u, trace_id))]
            for uri, trace in found:
                if "admin" in key.scopes or trace.outcome_metadata[SERVED]["key"] == key.name:
                    return uri
            if found:
                break
            await asyncio.sleep(2 * self._config.flush_s)
        raise ApiError(
            404,
            f"no answer {trace_id!r} that API key {key.name!r} got is kept: only those whose request says store: true are, and "
            "for a time",
            code="trace_not_found",
            param="trace_id",
        )

    def _stored(self, uri: str, trace_id: str) -> Trace | None:
        return self._store(uri).served(trace_id)

    def _store(self, uri: str) -> ServedStore:
        if uri not in self._stores:
            store = ServedStore(uri)
            store.create()
            self._stores[uri] = store
        return self._stores[uri]

    async def _flush(self) -> None:
        async with self._flushing:
            await self._flush_all()

    async def _flush_all(self) -> None:
        while self._pending:
            self._writing = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
            by_uri: dict[str, list[Pending]] = {}
            for pending in self._writing:
                by_uri.setdefault(pending.uri, []).append(pending)
            for uri, of_uri in by_uri.items():
                await self._write(uri, of_uri)
            self._writing = []
        for uri in self._stores:
            await self._retire(uri)

    async def _write(self, uri: str, pending: list[Pending]) -> None:
        traces, said = [p.trace for p in pending], [p.feedback for p in pending if p.feedback is not None]
        try:
            await asyncio.to_thread(lambda: self._store(uri).write_judged(traces, said))
        except (OSError, RuntimeError, ValueError) as error:
            self._count("failed", len(traces))
            logger.warning("%d served episodes are lost, %s cannot be written: %s", len(traces), uri, error)
        else:
            self._count("feedback", len(said))

    async def _retire(self, uri: str) -> None:
        if time.monotonic() < self._looked_at.get(uri, -RETENTION_S) + RETENTION_S:
            return
        self._looked_at[uri] = time.monotonic()
        try:
            before = time.time() - self._config.keep_days * 86_400
            num = await asyncio.to_thread(self._stores[uri].drop_before, before)
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # another replica does the same at this moment, or the store is down
            logger.warning("what is too old stays in %s for an hour: %s", uri, error)
        else:
            if num:
                logger.info("removed %d served episodes older than %g days", num, self._config.keep_days)
