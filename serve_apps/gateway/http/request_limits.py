"""request_limits: ASGI middleware: who may send what. It refuses foreign hosts, bodies without a key or too large, and counts requests.

Who may send is settled before a byte of the body is read: parsing and validating is work that strangers must not cause.
"""

from __future__ import annotations

import asyncio
import time

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_apps.gateway.traffic.admission import RATE_HEADERS
from serve_apps.gateway.traffic.callers import Callers
from serve_apps.gateway.traffic.service import Service
from serve_apps.openai_api.protocol import ApiError

WITH_BODY = ("POST", "PUT", "PATCH")
"""Methods whose body is read."""
MAX_SIZE_DIGITS = 18
"""Digits of a size that is read as a number; more are too large in any case."""


class RequestLimits:
    """Refuses a body without a key, too large or too slow; counts each request with the seconds to its first byte."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused request itself and passes the others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, has_begun = time.perf_counter(), False

        def count(status: int) -> None:
            path = getattr(scope.get("route"), "path", "unknown")
            self._service.metrics.count_request(path, status, time.perf_counter() - began)

        async def send_and_count(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                count(message["status"])
                MutableHeaders(scope=message).update(scope.get("state", {}).get("rate_headers", {}))
            await send(message)

        error = (
            self._service.callers.answers_to(Headers(scope=scope)) or self._key_error(scope) or self._size_error(scope)
        )
        try:
            if error is None:
                await self._app(self._as_json(scope), self._limited(scope, receive), send_and_count)
            else:
                await JSONResponse(error.body, status_code=error.status)(scope, receive, send_and_count)
        finally:
            if not has_begun:  # an unforeseen error: Starlette answers it with 500 outside of this middleware
                count(500)

    def _key_error(self, scope: Scope) -> ApiError | None:
        if scope["method"] not in WITH_BODY:
            return None
        try:
            self._service.callers.keys(Headers(scope=scope))
        except ApiError as error:
            return error
        return None

    def _size_error(self, scope: Scope) -> ApiError | None:
        headers, limit = Headers(scope=scope), self._service.config.max_body_bytes
        size, encoding = headers.get("content-length"), headers.get("content-encoding", "identity")
        if scope["method"] in WITH_BODY and encoding != "identity":
            message = f"bodies encoded as {encoding[:20]!r} are not accepted: send the JSON as it is"
            return ApiError(415, message, code="unsupported_encoding")
        if size is not None and size.isdecimal() and (len(size) > MAX_SIZE_DIGITS or int(size) > limit):
            return ApiError(
                413, f"the body has {size[:MAX_SIZE_DIGITS]} bytes, at most {limit} are accepted", code="body_too_large"
            )
        return None

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Returns a `receive` that gives up a body that is too large or comes too slowly, whatever its head said."""
        if scope["method"] not in WITH_BODY:
            return receive
        config = self._service.config
        deadline = asyncio.get_running_loop().time() + config.receive_timeout_s
        num_bytes, has_ended = 0, False

        async def receive_limited() -> Message:
            nonlocal num_bytes, has_ended
            if has_ended:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {config.receive_timeout_s:g} s") from None
            num_bytes += len(message.get("body", b""))
            has_ended = not message.get("more_body", False)
            if num_bytes > config.max_body_bytes:
                raise HTTPException(413, f"the body has more than the {config.max_body_bytes} bytes that are accepted")
            return message

        return receive_limited

    def _as_json(self, scope: Scope) -> Scope:
        """Returns the request as one with a JSON body where it does not say what its body is.

        Not without a key: a page of another site can make a browser send such a body, and the gateway could not tell.
        """
        headers = Headers(scope=scope)
        if scope["method"] not in WITH_BODY or "content-type" in headers or not self._service.callers.knows(headers):
            return scope
        scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]
        return scope


class PagesOfTeams(CORSMiddleware):
    """Lets pages call that any team allows: at which team they ask is not known before the body. There its door decides."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        headers = ["x-request-id", "x-troupe-team", "x-troupe-ignored", *RATE_HEADERS]
        super().__init__(app, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=headers)
        self._callers = callers

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether a page of this origin may call."""
        return self._callers.let_in(origin)
