"""What `telemetry` adds: the spans of a process, and those of a gateway's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stores.extensions import Extension

if TYPE_CHECKING:
    from fastapi import FastAPI

    from serve_apps.gateway.traffic.service import Service

EXTENSION = Extension(
    name="telemetry",
    spans="serve_apps.extensions.telemetry.otlp:Export",
    routes="serve_apps.extensions.telemetry.extension:add_to",
)


def add_to(api: FastAPI, service: Service) -> None:
    """Gives requests spans. Without an endpoint nothing of OpenTelemetry is imported."""
    if service.config.telemetry.endpoint:
        from serve_apps.extensions.telemetry.requests import RequestSpans

        api.add_middleware(RequestSpans)
