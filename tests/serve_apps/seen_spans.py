"""What a process exports: in its memory, and at a collector that takes OTLP over HTTP and reads the real messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_apps.config import TelemetryConfig
from serve_apps.extensions.telemetry.otlp import Export
from serve_apps.spans import Spans, process_spans, use_spans


@dataclass(frozen=True)
class Seen:
    """One span, as tests look at it."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first of a trace."""
    attributes: dict[str, Any]
    is_error: bool
    message: str
    """What the status says."""
    linked_spans: tuple[str, ...] = ()
    service: str = ""


@contextmanager
def exported(**settings: Any) -> Iterator[InMemorySpanExporter]:
    """Has this process export spans into its memory until the block ends."""
    memory = InMemorySpanExporter()
    config = TelemetryConfig(**({"endpoint": "http://127.0.0.1:9"} | settings))
    use_spans(Export(config, service="tests", exporter=memory))
    try:
        yield memory
    finally:
        use_spans(Spans())


def spans_of(memory: InMemorySpanExporter) -> list[Seen]:
    """Returns the spans that have ended, in the order in which they began."""
    process_spans().flush()
    return [_seen(span) for span in sorted(memory.get_finished_spans(), key=lambda span: span.start_time or 0)]


def tree_of(spans: Sequence[Seen], parent: str = "") -> list[Any]:
    """Returns the names of the spans below `parent`; where there are spans below one, as (name, those)."""
    below = [(span.name, tree_of(spans, span.span_id)) for span in spans if span.parent_id == parent]
    return [(name, inner) if inner else name for name, inner in below]


def _seen(span: ReadableSpan) -> Seen:
    assert span.context is not None
    return Seen(
        name=span.name,
        kind=span.kind.name,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id="" if span.parent is None else f"{span.parent.span_id:016x}",
        attributes=dict(span.attributes or {}),
        is_error=not span.status.is_ok,
        message=span.status.description or "",
        linked_spans=tuple(f"{link.context.span_id:016x}" for link in span.links),
        service=str(span.resource.attributes["service.name"]),
    )


@dataclass
class Collector:
    """A collector on this machine, which keeps what it is sent."""

    port: int
    spans: list[Seen] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """With which it answers."""
    may_answer: threading.Event = field(default_factory=threading.Event)
    """While it is not set, the collector hangs."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that answers, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            running.headers.append({name.lower(): value for name, value in self.headers.items()})
            running.may_answer.wait(60)
            if running.status == 200 and self.path == "/v1/traces":
                running.spans += _read(body)
            self.send_response(running.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    running = Collector(server.server_address[1])
    running.may_answer.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield running
    finally:
        running.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _read(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    kinds = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}
    return [
        Seen(
            name=span.name,
            kind=kinds[span.kind],
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes={a.key: _value(a.value) for a in span.attributes},
            is_error=span.status.code == 2,
            message=span.status.message,
            linked_spans=tuple(link.span_id.hex() for link in span.links),
            service={a.key: _value(a.value) for a in resource.resource.attributes}["service.name"],
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
