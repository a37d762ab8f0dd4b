"""What `prometheus` adds: an observer that shows runs to Prometheus."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="prometheus", observer="pipelines.extensions.prometheus.points:Prometheus")
