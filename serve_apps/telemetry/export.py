"""export: the one export of spans of this process, or none. Without one nothing of OpenTelemetry is imported.

Only `flush_export` and `end_export` wait for a collector, for two seconds at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_apps.config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from serve_apps.telemetry.otlp import Export

_export: Export | None = None


def current_export() -> Export | None:
    """Returns the export of this process; None where there is none."""
    return _export


def begin_export(config: TelemetryConfig, *, service: str, exporter: SpanExporter | None = None) -> None:
    """Has this process export spans as `config` says, from now on. ValueError where a header's variable is not set.

    Args: service: the name of what runs here, where OTEL_SERVICE_NAME does not say it. exporter: default: to `config.endpoint`.
    """
    global _export
    if _export is not None and _export.config == config and exporter is None:
        return
    end_export()
    if config.endpoint:
        from serve_apps.telemetry.otlp import Export

        _export = Export(config, service=service, exporter=exporter)


def flush_export() -> None:
    """Waits for a moment until the spans of this process that have ended are sent."""
    if _export is not None:
        _export.flush()


def end_export() -> None:
    """Sends what is left, in a moment; this process exports no more."""
    global _export
    ended, _export = _export, None
    if ended is not None:
        ended.end()
