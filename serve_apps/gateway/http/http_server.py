"""http_server: the application of a gateway replica -> the server that answers on its sockets, with limits on every connection."""

from __future__ import annotations

from functools import partial

import uvicorn
from fastapi import FastAPI

from serve_apps.config import GatewayPortConfig
from serve_apps.gateway.http.connections import ConnectionLimits, LimitedConnection

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
