"""requests: ASGI middleware by which each POST request has a span, in the trace of its caller (`traceparent`).

GET requests read what there is and have none: those of health checks and scrapers would drown the others.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import propagate
from opentelemetry.trace import Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_apps.extensions.telemetry import names
from serve_apps.extensions.telemetry.otlp import Export
from serve_apps.extensions.telemetry.spans import CANCELLED, Attributes, LiveSpan, open_span
from serve_apps.spans import process_spans

REQUEST_ID_HEADER = "x-request-id"
MAX_PATH = 200
"""Characters of a path in a span."""


class RequestSpans:
    """Opens a span for each POST request; it ends with the last byte of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, inside its span."""
        export = process_spans()
        if not isinstance(export, Export) or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        answer = _Answer()

        async def send_noted(message: Message) -> None:
            await send(message)
            answer.note(message)

        with _span_of(export.tracer, scope) as span:
            try:
                await self._app(scope, receive, send_noted)
            finally:
                if route := getattr(scope.get("route"), "path", ""):  # known only now
                    span.span.update_name(f"POST {route}")
                    span.span.set_attribute(names.HTTP_ROUTE, route)
                span.span.set_attribute(names.REQUEST_ID, _request_id(scope, answer))
                span.record(answer)


class _Answer:
    """What was sent to the caller."""

    def __init__(self) -> None:
        self.status = 500
        """Until an answer begins: an unforeseen error is answered outside of this middleware."""
        self.request_id = ""
        self.is_complete = False

    def note(self, message: Message) -> None:
        """Takes a message to the caller."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = Headers(raw=message["headers"]).get(REQUEST_ID_HEADER, "")
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)


def _span_of(tracer: Tracer, scope: Scope) -> LiveSpan:
    address, port = scope.get("server") or ("", None)
    attributes: dict[str, Any] = {
        names.HTTP_REQUEST_METHOD: "POST",
        names.URL_PATH: scope["path"][:MAX_PATH],
        names.URL_SCHEME: scope["scheme"],
        names.NETWORK_PROTOCOL_VERSION: scope["http_version"],
        names.SERVER_ADDRESS: address,
    }
    if port is not None:
        attributes[names.SERVER_PORT] = port
    parent = propagate.extract(Headers(scope=scope))
    return open_span(tracer, "POST", attributes, kind="server", parent=parent, describe=_about_answer)


def _about_answer(answer: _Answer) -> Attributes:
    """Returns what a span says of an answer. One with a status below 500 is no failure of the server, unless it broke off."""
    said: dict[str, Any] = {names.HTTP_RESPONSE_STATUS_CODE: answer.status}
    if answer.status >= 500:
        said[names.ERROR_TYPE] = str(answer.status)
    elif not answer.is_complete:
        said[names.ERROR_TYPE] = CANCELLED
    return said


def _request_id(scope: Scope, answer: _Answer) -> str:
    """Returns the `x-request-id` that the caller gets: its own, that of the answer, or that of the request."""
    asked, given = Headers(scope=scope).get(REQUEST_ID_HEADER), scope.get("state", {}).get("request_id", "")
    return str(given if asked == given or not answer.request_id else answer.request_id)
