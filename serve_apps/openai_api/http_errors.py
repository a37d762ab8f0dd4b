"""http_errors: what all our HTTP applications share: errors in OpenAI's form, and no work for callers who have left."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_apps.openai_api.protocol import ApiError, invalid_body_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

STREAM = "text/event-stream"


def add_errors(api: FastAPI) -> None:
    """Makes an application answer every error in OpenAI's form, and name every answer."""

    api.exception_handler(ApiError)(_api_error)
    api.exception_handler(RequestValidationError)(_validation_error)
    api.exception_handler(HTTPException)(_http_exception)
    api.exception_handler(Exception)(_unexpected_error)
    api.add_middleware(RequestIds)


async def _api_error(_: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
    api_error = invalid_body_error(list(error.errors()))
    return JSONResponse(api_error.body, status_code=api_error.status)


async def _http_exception(request: Request, error: HTTPException) -> JSONResponse:
    code = "not_found" if error.status_code == 404 else "refused"
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = (
            f"{message}: there is no route {request.method} {request.url.path[:200]}; GET /openapi.json lists them"
        )
    api_error = ApiError(error.status_code, message, code=code)
    return JSONResponse(api_error.body, status_code=error.status_code, headers=error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    name = request.state.request_id  # this handler answers outside of the middleware that would name it
    logger.error("%s %s failed, request %s", request.method, request.url.path, name, exc_info=error)
    api_error = ApiError(500, "the gateway failed at this request; its log says why", code="internal_error")
    return JSONResponse(api_error.body, status_code=500, headers={HEADER: name})


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, or cancels it as soon as the client disconnects; ApiError 499."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
