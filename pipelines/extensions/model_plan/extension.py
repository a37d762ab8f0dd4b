"""What `model_plan` adds: lines of `troupe validate` on dtypes, disk and memory."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="model_plan", notes="pipelines.extensions.model_plan.plan:notes")
