"""connections: how many connections a gateway replica has open, and how long it waits for the head of a request.

    connection ──> waits for a head ──> a request is answered ──> waits for the next one
                   receive_timeout_s, counted from its first byte; before that uvicorn's own limit for idle connections

Where the connections are as many as there may be, a new one takes the place of the one that has waited longest.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

OTHER_FILES = 128
"""Files that a replica keeps open beside connections: logs, tables, connections to Ray."""


class ConnectionLimits:
    """The connections of one gateway replica that no request is on. It lives in one event loop."""

    def __init__(self, *, max_open: int, head_timeout_s: float) -> None:
        """Takes fewer connections than `max_open` where this process may not open as many files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            max_open = max(1, min(max_open, files - OTHER_FILES))
        self.max_open, self.head_timeout_s = max_open, head_timeout_s
        self.waiting: dict[LimitedConnection, None] = {}
        """Connections without a request, in the order in which they began to wait."""

    def make_room(self, num_open: int, newest: LimitedConnection) -> None:
        """Closes the connection that has waited longest if there are too many; `newest` where all others have requests."""
        if num_open > self.max_open:
            next(iter(self.waiting), newest).abort()


class LimitedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed where the head of a request takes too long, or others need its place."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Counts the connection, which must send a head in time."""
        super().connection_made(transport)
        self._limits.make_room(len(self.connections), self)
        self._limits.waiting[self] = None
        self._begin_deadline()

    def data_received(self, data: bytes) -> None:
        """Ends the wait where the head is complete, and begins the time for one where it is not."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._limits.waiting.pop(self, None)
            self._end_deadline()
        elif self._deadline is None:
            self._begin_deadline()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._limits.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection that is closed, whoever closed it."""
        self._limits.waiting.pop(self, None)
        self._end_deadline()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection at once."""
        self._limits.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def _begin_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._limits.head_timeout_s, self.abort)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
