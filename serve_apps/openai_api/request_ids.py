"""request_ids: ASGI middleware by which every answer has an `x-request-id`, errors too: the caller's own, or one of ours."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
PATTERN = re.compile(r"[!-~]{1,128}")
"""What a caller's own id may be: printable, without space."""


class RequestIds:
    """Names requests. Logs can find the id in `scope["state"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and adds the header to its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(HEADER, "")
        own = asked if PATTERN.fullmatch(asked) else ""
        name = own or f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if own or HEADER not in headers:
                    headers[HEADER] = name
            await send(message)

        await self._app(scope, receive, send_named)
