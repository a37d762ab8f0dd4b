"""What `model_plan` adds: lines of `troupe validate` on dtypes and memory, and of `troupe train` on the disk."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="model_plan",
    notes="pipelines.extensions.model_plan.plan:notes",
    begins="pipelines.extensions.model_plan.disk:check_disk",
)
