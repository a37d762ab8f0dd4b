"""capture: answers whose callers agreed -> the team's store of served episodes, in batches, and callers' feedback on them.

    answer ── consent, share ──> pending ── every flush_s, in a thread ──> redaction ──> stores/traces/served.py

No request waits for redaction or a write. An answer that finds the pending list full is dropped and counted as such. Where the store cannot
be written the pending episodes are lost, but no request fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from serve_apps.chat.long_texts import giving_back
from serve_apps.config import CaptureConfig
from serve_apps.gateway.traffic.callers import ApiKey
from serve_apps.gateway.traffic.redaction import Redaction
from serve_apps.gateway.traffic.teams import ServedTeam, TeamRoute
from serve_apps.openai_api.protocol import ApiError, FeedbackRequest
from stores.store_faults import UnreadableStore
from stores.traces.rows import as_stored
from stores.traces.served import Feedback, ServedStore
from stores.types import SERVED, Trace

logger = logging.getLogger(__name__)

Captured = Literal["kept", "dropped"]
"""Whether an episode whose caller agreed to have it stored waits to be written."""

RETENTION_INTERVAL_S = 3600.0
"""Between two searches for episodes that are older than `keep_days`."""
BATCH_SIZE = 64
BATCH_CHARACTERS = 4_000_000
"""Characters of the episodes that are written together, unless one alone has more: to write them takes several times their memory."""
MAX_PENDING = 1000
"""Episodes that may wait to be written; further ones are not stored."""
MAX_CHARACTERS = 32_000_000
"""Characters of all episodes that wait to be written."""
MAX_SEARCHES = 16
"""Answers that are looked for at once, to store feedback on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An episode that waits to be written."""

    trace: Trace
    """As it was answered, not redacted."""
    served: Mapping[str, Any]
    """What is stored about how it was served (`SERVED`)."""
    feedback: Feedback | None
    """Its caller's feedback, where it came with the episode."""
    size: int
    """Its characters, about."""


class Capture:
    """Stores episodes of one team on one gateway replica. It lives in one event loop.

    `begin` it, and `close` it at the end.
    """

    def __init__(self, config: CaptureConfig, uri: str | None, *, count: Callable[[str, int], None]) -> None:
        """Args:
        uri: of the team's store; None: it was deployed without one.
        count: is called with an outcome (kept, redacted, dropped, failed, feedback) and a number of episodes.
        """
        self.config, self.uri, self._count = config, uri, count
        self._redaction = Redaction(config.redact)
        self._pending: deque[Pending] = deque()
        self._writing: list[Pending] = []
        self._num_characters = 0
        """Of the pending episodes and those that are being written."""
        self._opened: ServedStore | None = None
        self._writer: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self._retention_checked_at = -RETENTION_INTERVAL_S

    def should_keep(self, store: bool | None) -> bool:
        """Whether to store an answer; of those that may be stored it takes `capture.share`, at random.

        Args: store: the field `store` of the request.
        """
        is_allowed = store is True or (store is None and self.config.consent == "given")
        return is_allowed and random.random() < self.config.share

    def keep_trace(
        self, trace: Trace, *, team: ServedTeam, key: ApiKey, is_trainable: bool, score: float | None = None
    ) -> Captured:
        """Puts an episode on the pending list; returns what happened to it.

        Args: score: the caller's feedback on it, -1 to 1, if it is known already.
        """
        size = _size_of(trace)
        is_full = len(self._pending) >= MAX_PENDING or self._num_characters + size > MAX_CHARACTERS
        if self.uri is None or is_full:
            self._count("dropped", 1)
            return "dropped"
        self._num_characters += size
        served = {
            "team": team.name,
            "team_version": team.version,
            "alias": team.alias,
            "key": key.name,
            "is_trainable": is_trainable,
        }
        feedback = None
        if score is not None:
            feedback = Feedback(trace_id=trace.episode_id, key=key.name, at=time.time(), score=score)
        self._pending.append(Pending(trace=trace, served=served, feedback=feedback, size=size))
        self.begin()
        return "kept"

    def begin(self) -> None:
        """Begins to write what is pending, and to remove what is old, also of a store to which nothing is added any more."""
        if self.uri is not None and (self._writer is None or self._writer.done()):
            self._writer = asyncio.ensure_future(self._write_repeatedly())

    async def close(self) -> None:
        """Writes the pending episodes and ends the writer."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})
            await self._flush()

    async def _write_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self.config.flush_s)
            await asyncio.shield(self._flush())  # `close` cancels this task: a write that has begun must end

    async def has_answer(self, trace_id: str, *, team: str, key: ApiKey) -> bool:
        """Whether the store has an answer of this team to this caller, or will have it: feedback may come before it is written."""
        pending = [*self._pending, *self._writing]
        served = [p.served for p in pending if p.trace.episode_id == trace_id]
        if not served and (trace := await asyncio.to_thread(lambda: self._store().served(trace_id))):
            served = [trace.outcome_metadata[SERVED]]
        return any(s["team"] == team and ("admin" in key.scopes or s["key"] == key.name) for s in served)

    async def write_feedback(self, feedback: Feedback) -> None:
        """Stores a caller's feedback on an answer."""
        await asyncio.to_thread(lambda: self._store().write_feedback(self._redaction.clean(feedback)))
        self._count("feedback", 1)

    def _store(self) -> ServedStore:
        if self._opened is None:
            assert self.uri is not None, "nothing is kept, and no answer looked for, without a store"
            store = ServedStore(self.uri)
            store.create()
            self._opened = store
        return self._opened

    async def _flush(self) -> None:
        async with self._flushing:
            while self._pending:
                self._writing = self._next_batch()
                await self._write(self._writing)
                self._num_characters -= sum(pending.size for pending in self._writing)
                self._writing = []
            await self._drop_old()

    def _next_batch(self) -> list[Pending]:
        batch = [self._pending.popleft()]
        size = batch[0].size
        while self._pending and len(batch) < BATCH_SIZE and size + self._pending[0].size <= BATCH_CHARACTERS:
            batch.append(self._pending.popleft())
            size += batch[-1].size
        return batch

    async def _write(self, pending: list[Pending]) -> None:
        feedback = [p.feedback for p in pending if p.feedback is not None]
        try:
            redacted = [await asyncio.to_thread(self._redaction.redact, p.trace) for p in pending]
            size = sum(p.size for p in pending)

            def write() -> None:
                traces = [_stored(p, trace) for p, trace in zip(pending, redacted, strict=True)]
                self._store().write_judged(traces, feedback)

            await asyncio.to_thread(giving_back, size, write)
        except Exception as error:  # noqa: BLE001 - outcomes hold objects of a team's own classes, and the writer must go on
            self._count("failed", len(pending))
            logger.warning("%d served episodes are lost, %s cannot be written: %s", len(pending), self.uri, error)
        else:
            num_redacted = sum(trace is not None for trace in redacted)
            self._count("redacted", num_redacted)
            self._count("kept", len(pending) - num_redacted)
            self._count("feedback", len(feedback))

    async def _drop_old(self) -> None:
        """Removes the episodes that are older than `keep_days`, once per `RETENTION_INTERVAL_S`, where there is a store."""
        if self.uri is None or time.monotonic() < self._retention_checked_at + RETENTION_INTERVAL_S:
            return
        store = self._opened or ServedStore(self.uri)
        self._retention_checked_at = time.monotonic()
        try:
            before = time.time() - self.config.keep_days * 86_400
            num_dropped = await asyncio.to_thread(lambda: store.drop_before(before) if store.is_there() else 0)
        except (OSError, RuntimeError, ValueError) as error:
            # Another replica does the same at this moment, or the store is down.
            logger.warning("old episodes stay in %s for another hour: %s", self.uri, error)
        else:
            if num_dropped:
                logger.info("removed %d served episodes older than %g days", num_dropped, self.config.keep_days)


class Captures:
    """The captures of all teams of one gateway replica, each as its team's settings say."""

    def __init__(self, *, count: Callable[[str, int], None]) -> None:
        """Args: count: see Capture."""
        self._count = count
        self._of_team: dict[str, Capture] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._num_searches = 0

    def follow(self, teams: Mapping[str, TeamRoute]) -> None:
        """Captures as these routes say from now on. What waits to be written is written as it was taken."""
        before, self._of_team = self._of_team, {}
        for name, route in teams.items():
            config, uri = route.settings.capture, None if route.stores is None else route.stores.served
            running = before.get(name)
            is_same = running is not None and (running.config, running.uri) == (config, uri)
            self._of_team[name] = running if running and is_same else Capture(config, uri, count=self._count)
            self._of_team[name].begin()
        for name, capture in before.items():
            if self._of_team.get(name) is not capture and capture.uri is not None:
                closing = asyncio.ensure_future(capture.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def should_keep(self, team: ServedTeam, store: bool | None) -> bool:
        """Whether to store an answer of a team; see `Capture.should_keep`."""
        return team.name in self._of_team and self._of_team[team.name].should_keep(store)

    def keep_trace(self, trace: Trace, *, team: ServedTeam, **served: Any) -> Captured:
        """Puts an episode on the pending list of its team; see `Capture.keep_trace`."""
        if (capture := self._of_team.get(team.name)) is not None:
            return capture.keep_trace(trace, team=team, **served)
        self._count("dropped", 1)
        return "dropped"

    async def store_feedback(self, trace_id: str, feedback: FeedbackRequest, keys: Mapping[str, ApiKey]) -> Feedback:
        """Stores a caller's feedback on an answer that it got of one of the teams that it reaches.

        ApiError 404 where no such answer of this caller is stored, 429 where too many are looked for, 503 where the store cannot be
        read or written.

        Args: keys: by team, the caller's keys.
        """
        try:
            team, capture = await self._team_of_answer(trace_id, keys)
            stored = Feedback(trace_id=trace_id, key=keys[team].name, at=time.time(), **feedback.model_dump())
            await capture.write_feedback(stored)
        except (UnreadableStore, OSError) as error:
            logger.warning("feedback on %s is not stored: %s", trace_id, error)
            reason = "the store of answers cannot be used now: try again later; the gateway's log says why"
            raise ApiError(503, reason, code="store_unreadable") from error
        return stored

    async def close(self) -> None:
        """Writes all pending episodes and ends the writers."""
        for capture in self._of_team.values():
            await capture.close()
        if self._closing:
            await asyncio.wait({*self._closing})

    async def _team_of_answer(self, trace_id: str, keys: Mapping[str, ApiKey]) -> tuple[str, Capture]:
        captures = {name: c for name, c in self._of_team.items() if name in keys and c.uri is not None}
        longest_s = max((capture.config.flush_s for capture in captures.values()), default=0)
        for wait_s in (0, 2 * longest_s):  # a second time after a wait, since another replica may be about to write it
            await asyncio.sleep(wait_s)
            with self._searching():
                for name, capture in captures.items():
                    if await capture.has_answer(trace_id, team=name, key=keys[name]):
                        return name, capture
        raise ApiError(
            404,
            f"no answer {trace_id!r} to API key {next(iter(keys.values())).name!r} is stored: answers are stored for a limited time, "
            "and only if the request says store: true",
            code="trace_not_found",
            param="trace_id",
        )

    @contextmanager
    def _searching(self) -> Iterator[None]:
        """Counts a search; ApiError 429 where there are too many. To wait for a team's next write is none: that may take minutes."""
        if self._num_searches >= MAX_SEARCHES:
            raise ApiError(
                429, "too much feedback is being stored: try again later", code="overloaded", retry_after_s=1
            )
        self._num_searches += 1
        try:
            yield
        finally:
            self._num_searches -= 1


def _size_of(trace: Trace) -> int:
    turns = sum(len(t.prompt_text) + len(t.completion_text) + 8 * len(t.prompt_token_ids) for t in trace.turns)
    try:
        metadata = len(repr([trace.task.metadata, trace.outcome_metadata]))
    except Exception:  # noqa: BLE001 - any class may define a repr that raises, and the request was answered
        metadata = 0
    return turns + len(trace.task.prompt) + metadata


def _stored(pending: Pending, redacted: Trace | None) -> Trace:
    """Returns the episode as it is written. What was redacted has lost its tokens, and nothing is trained on it."""
    trace = redacted or pending.trace
    served = {**pending.served, "is_trainable": pending.served["is_trainable"] and redacted is None}
    # Keys that are no texts would make the store write all of these values as texts, `served` among them.
    return replace(trace, outcome_metadata={**as_stored(trace.outcome_metadata), SERVED: served})
