"""spans: a piece of work -> its span, which is that of the work inside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from serve_apps.extensions.telemetry.names import ERROR_TYPE
from serve_apps.spans import Span

Attributes = Mapping[str, Any]
Kind = Literal["client", "server", "internal"]
CANCELLED = "cancelled"
"""The `error.type` of work that was given up: its caller has left, or nobody needs it any more."""


class LiveSpan(Span):
    """Is a span that ends with its block, with the error that the block raises.

    What an error says may quote a caller: it stands in the span only where texts do.
    """

    def __init__(
        self,
        span: trace.Span,
        *,
        is_current: bool,
        with_messages: Callable[[], bool],
        describe: Callable[[Any], Attributes],
    ) -> None:
        self.span = span
        self._is_current, self._with_messages, self._describe = is_current, with_messages, describe
        self._token: Any = None

    def __enter__(self) -> Self:
        if self._is_current:
            self._token = context.attach(trace.set_span_in_context(self.span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._token is not None:
            context.detach(self._token)
        if error is not None:
            self.fail(error_type(error), str(error))
        self.span.end()

    def record(self, result: Any) -> None:
        """Sets what the span says of a result; with an `error.type` among it the span has failed."""
        if not self.span.is_recording():
            return
        attributes = self._describe(result)
        self.span.set_attributes(attributes)
        if ERROR_TYPE in attributes:
            self.fail(attributes[ERROR_TYPE])

    def fail(self, kind: str, message: str = "") -> None:
        """Marks the work as failed."""
        self.span.set_attribute(ERROR_TYPE, kind)
        self.span.set_status(Status(StatusCode.ERROR, clipped(message) if self._with_messages() else None))


def open_span(
    tracer: Tracer,
    name: str,
    attributes: Attributes,
    *,
    kind: Kind = "internal",
    parent: context.Context | None = None,
    links: Sequence[trace.Link] = (),
    start_time_ns: int | None = None,
    is_current: bool = True,
    with_messages: Callable[[], bool] = lambda: False,
    describe: Callable[[Any], Attributes] = dict,
) -> LiveSpan:
    """Returns a span that has begun, to be used as a block.

    Args:
        parent: the context whose span it belongs to; None: the current one.
        is_current: whether spans of the work inside belong to it. Not in a generator, whose blocks may end in another task.
        with_messages: says, when the work fails, whether the message of its error may stand in it.
        describe: the result of the work -> attributes; see `Span.record`.
    """
    span = tracer.start_span(
        name,
        context=parent,
        kind=SpanKind[kind.upper()],
        attributes=attributes,
        links=links,
        start_time=start_time_ns,
        record_exception=False,
        set_status_on_exception=False,
    )
    return LiveSpan(span, is_current=is_current, with_messages=with_messages, describe=describe)


def error_type(error: BaseException) -> str:
    """Returns a name for an error, one of few: an API error's code, or the class."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return CANCELLED
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code else type(error).__name__


MAX_TEXT = 16_384
"""Characters of the texts in one attribute of a span. Of a longer text the end stands there: the last message of a prompt."""


def clipped(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text, or the end of a long one."""
    return text if len(text) <= limit else f"[...]{text[-limit:]}"


def as_json(value: Any) -> str:
    """Returns arguments or a result as JSON, or its end; what JSON does not have is written as Python writes it."""
    return clipped(json.dumps(value, ensure_ascii=False, default=repr))


def messages(role: str, texts: Sequence[str], finish_reasons: Sequence[str] = ()) -> str:
    """Returns one message per text in the form of `gen_ai.input.messages` and `gen_ai.output.messages`."""
    limit = MAX_TEXT // max(1, len(texts))
    listed: list[Mapping[str, Any]] = [
        {"role": role, "parts": [{"type": "text", "content": clipped(text, limit)}]} for text in texts
    ]
    if finish_reasons:
        listed = [{**m, "finish_reason": reason} for m, reason in zip(listed, finish_reasons, strict=True)]
    return json.dumps(listed, ensure_ascii=False)
