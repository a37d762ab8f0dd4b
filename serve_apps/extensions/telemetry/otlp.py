"""otlp: settings -> the spans of a process, which go to a collector by OTLP over HTTP.

ended spans ──> queue (2,048; what comes to a full one is lost) ──> a thread ──> ToldOnce ──> collector
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from opentelemetry import context, propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler

from serve_apps.config import ENVIRONMENT, TelemetryConfig
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.extensions.telemetry.episodes import LiveEpisodeSpans
from serve_apps.spans import Served, Spans
from stores.urls import ask_directly

logger = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long `flush` and `end` wait for a collector."""
EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
QUEUE_LOG = "opentelemetry.sdk._shared_internal"
"""The loggers of OpenTelemetry that write again and again while a collector is away."""


class Export(Spans):
    """Exports the spans that its tracer makes, in batches."""

    def __init__(self, config: TelemetryConfig, *, service: str, exporter: SpanExporter | None = None) -> None:
        """Begins to export. ValueError where a header's variable is not set. Args: exporter: default: to `config.endpoint`."""
        self.config = config
        self._exporter = ToldOnce(exporter or _otlp_exporter(config), config.endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        # Not at the exit of the process: there it would wait half a minute for a collector that hangs.
        self._provider = TracerProvider(
            sampler=_sampler(config.sample), resource=_resource(service), shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._processor)
        self.tracer = self._provider.get_tracer("troupe", version("troupe-rl"))
        self._flushing: threading.Thread | None = None

    def episode(self, spec: EpisodeSpec, *, workflow: str, attempt: int, served: Served | None) -> LiveEpisodeSpans:
        """Returns spans of an attempt that are exported."""
        about: dict[str, Any] = {"workflow": workflow, "attempt": attempt, "served": served}
        return LiveEpisodeSpans(self.tracer, spec, **about, texts=self.config.texts)

    def model_call(self, call: Any, pieces: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """Returns the pieces in a span that is exported."""
        from serve_apps.extensions.telemetry.calls import in_span  # which a process that plays episodes has no use for

        return in_span(self.tracer, call, pieces, texts=self.config.texts)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leaves the current context for a while."""
        token = context.attach(context.Context())
        try:
            yield
        finally:
            context.detach(token)

    def headers(self) -> dict[str, str]:
        """See Spans; it is `traceparent`."""
        headers: dict[str, str] = {}
        propagate.inject(headers)
        return headers

    def flush(self) -> None:
        """Waits until the spans that have ended are sent, for at most `WAIT_S`."""
        if self._flushing is None or not self._flushing.is_alive():  # one that hangs is not joined by others
            self._flushing = _begin(self._processor.force_flush)
        self._flushing.join(WAIT_S)

    def end(self) -> None:
        """Sends what is left and takes no more, in at most `WAIT_S`."""
        ending = _begin(self._provider.shutdown)
        ending.join(WAIT_S)
        if ending.is_alive():
            self._exporter.give_up()


class ToldOnce(SpanExporter):
    """Exports by another exporter; logs when that begins to fail and when it works again, in place of every failure."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """Silences the library's own messages. Args: endpoint: what the log calls the collector."""
        self._exporter, self._endpoint = exporter, endpoint
        self._num_lost = 0
        self._is_given_up = False
        self._failure = _Silenced(EXPORTER_LOG)
        _Silenced(QUEUE_LOG)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch; one that fails is lost."""
        result = self._exporter.export(spans)
        if self._is_given_up:
            return result
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.warning("spans are sent to %s again, %d or more were lost", self._endpoint, self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            logger.warning("spans are lost until %s takes them: %s", self._endpoint, self._failure.text)
        self._num_lost += len(spans)
        return result

    def give_up(self) -> None:
        """Says that the last spans may be lost, and nothing after that."""
        self._is_given_up = True
        logger.warning("the last spans may be lost: %s did not take them within %g s", self._endpoint, WAIT_S)

    def shutdown(self) -> None:
        """Ends a wait for the next attempt, if there is one."""
        self._exporter.shutdown()


class _Silenced(logging.Filter):
    """Keeps the last message of a logger, and lets none through."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.text = ""
        log = logging.getLogger(name)
        log.filters = [self, *(f for f in log.filters if not isinstance(f, _Silenced))]

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


def _sampler(share: float) -> Sampler | None:
    """Returns the sampler of a share of the traces that begin here; None: as OTEL_TRACES_SAMPLER says."""
    return None if "OTEL_TRACES_SAMPLER" in os.environ else ParentBasedTraceIdRatio(share)


def _resource(service: str) -> Resource:
    """Returns what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say; where they do not name the service, `service`."""
    resource = Resource.create()
    is_named = not str(resource.attributes[SERVICE_NAME]).startswith("unknown_service")
    return resource if is_named else resource.merge(Resource({SERVICE_NAME: service}))


def _otlp_exporter(config: TelemetryConfig) -> OTLPSpanExporter:
    headers = {}
    for name, variable in config.headers.items():
        if variable not in os.environ:
            raise ValueError(
                f"telemetry.headers.{name}: the environment variable {variable} is not set where the spans are made: set it for the Ray "
                "nodes, or drop the header"
            )
        headers[name] = os.environ[variable]
    ask_directly()  # a collector on this machine is not behind a proxy
    url = None if config.endpoint == ENVIRONMENT else f"{config.endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=url, headers=headers)


def _begin(work: Callable[[], Any]) -> threading.Thread:
    """Begins work in a thread that no process waits for when it ends."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
