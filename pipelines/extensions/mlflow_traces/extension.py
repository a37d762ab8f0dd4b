"""What `mlflow_traces` adds: a few episodes of each iteration in MLflow."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="mlflow_traces", episodes="pipelines.extensions.mlflow_traces.traces:show")
