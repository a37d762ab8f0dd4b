"""surface: what every HTTP surface of ours does. Errors in OpenAI's form, and no work for a caller who is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serve_apps.openai_api.protocol import ApiError, explained

logger = logging.getLogger(__name__)

T = TypeVar("T")

STREAM = "text/event-stream"


def add_errors(api: FastAPI) -> None:
    """Has every error answered in OpenAI's form."""

    @api.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = explained(list(error.errors()))
        return JSONResponse(found.body, status_code=found.status)

    @api.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        found = ApiError(
            error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else "refused"
        )
        return JSONResponse(found.body, status_code=error.status_code, headers=error.headers)

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        found = ApiError(500, "the gateway failed at this request; its log says why", code="internal_error")
        return JSONResponse(found.body, status_code=500)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """`work`, ended as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
