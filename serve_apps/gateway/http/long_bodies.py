"""long_bodies: routes that read JSON of two megabytes in tens of milliseconds, whatever is in it.

While Python's parser makes a million small lists, its garbage collector looks through them again and again: ten times the work, in
which all callers wait. Nothing is garbage before the parser is done.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

LONG_BYTES = 50_000
"""Bytes of a body from which on it is worth it."""


class LongBodyRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's own handler, which is given another kind of request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive, request._send))

        return handle


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = read_json(await self.body())
        return self._json


def read_json(body: bytes) -> Any:
    """Reads JSON as `json.loads` does, and raises what it raises."""
    if len(body) < LONG_BYTES or not gc.isenabled():
        return json.loads(body)
    gc.disable()
    try:
        return json.loads(body)
    finally:
        gc.enable()
