"""connections: how many connections a gateway replica has open, and how long it waits for what a caller sends or reads.

    connection ──> waits for a head ──> a request is answered ──> waits for the next one
                   receive_timeout_s, counted from its first byte; before that uvicorn's own limit for idle connections
                   MAX_HEAD_BYTES         STALLED_S without a byte read: the caller does not take its answer

Where the connections are as many as there may be, a new one takes the place of the one that has waited longest.
"""

from __future__ import annotations

import asyncio
import resource
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from serve_apps.config import GatewayPortConfig
from serve_apps.http.http_connection import HttpConnection

OTHER_FILES = 128
"""Files that a replica keeps open beside connections: logs, tables, connections to Ray."""
MAX_HEAD_BYTES = 65_536
"""Bytes of the head of a request; the parser itself would take a head of any length into memory."""
MAX_READ_BYTES = 16_384
"""Bytes after which a long read is looked at: how far a head may pass its limit."""
MAX_PIPELINED = 16
"""Requests of one connection that wait behind the one that is being answered."""
STALLED_S = 30.0
"""Seconds for which a caller may read nothing of an answer that waits for it."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ConnectionLimits:
    """The connections of one gateway replica that no request is on. It lives in one event loop."""

    def __init__(self, *, max_open: int, head_timeout_s: float, stalled_s: float = STALLED_S) -> None:
        """Takes fewer connections than `max_open` where this process may not open as many files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            max_open = max(1, min(max_open, files - OTHER_FILES))
        self.max_open, self.head_timeout_s, self.stalled_s = max_open, head_timeout_s, stalled_s
        self.waiting: dict[LimitedConnection, None] = {}
        """Connections without a request, in the order in which they began to wait."""

    def make_room(self, num_open: int, newest: LimitedConnection) -> None:
        """Closes the connection that has waited longest if there are too many; `newest` where all others have requests."""
        if num_open > self.max_open:
            next(iter(self.waiting), newest).abort()


class LimitedConnection(HttpConnection):
    """A connection that is closed where the head of a request takes too long, or others need its place."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_in_head, self._head_bytes = False, 0
        self._unanswered: list[Any] = []
        """The requests of this connection that are being answered or wait for that, oldest first."""

    def connection_made(self, transport: Any) -> None:
        """Counts the connection, which must send a head in time."""
        super().connection_made(transport)
        self._limits.make_room(len(self.connections), self)
        self._limits.waiting[self] = None
        self._begin_deadline()

    def data_received(self, data: bytes) -> None:
        """Ends the wait where the head is complete, and begins the time for one where it is not."""
        for start in range(0, len(data), MAX_READ_BYTES):
            if not self.transport.is_closing():
                self._part_received(data[start : start + MAX_READ_BYTES])

    def _part_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
                return
        if self.cycle is not None and not self.cycle.response_complete:
            self._limits.waiting.pop(self, None)
            self._end_deadline()
        elif self._deadline is None:
            self._begin_deadline()

    def on_message_begin(self) -> None:
        """Counts the bytes of a head from here on."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Begins a request. ValueError, which the parser turns into status 400, where too many wait on this connection."""
        self._is_in_head = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait on this connection")
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._limits.waiting[self] = None

    def pause_writing(self) -> None:
        """Begins the time in which the caller must read."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._limits.stalled_s, self.abort)

    def resume_writing(self) -> None:
        """Ends that time: the caller has read."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection that is closed, whoever closed it, and tells all its requests, not the newest alone."""
        self._limits.waiting.pop(self, None)
        self._end_deadline()
        if self._stalled is not None:
            self._stalled.cancel()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
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


DRAIN_S = 20.0
"""How long a replica that must stop may take to finish the requests that it has begun."""
IDLE_S = 75
"""How long a connection may be idle between two requests."""


def make_server(api: FastAPI, config: GatewayPortConfig) -> uvicorn.Server:
    """Returns a server that listens on nothing yet: give `serve` its sockets. It leaves signals to the process."""
    limits = ConnectionLimits(max_open=config.max_connections, head_timeout_s=config.receive_timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(
            api,
            http=partial(LimitedConnection, limits=limits),  # type: ignore[arg-type]
            ws="none",  # no route is one: an upgrade would leave the limits of `LimitedConnection`
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(DRAIN_S),
            timeout_keep_alive=IDLE_S,
            server_header=False,
        )
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server
