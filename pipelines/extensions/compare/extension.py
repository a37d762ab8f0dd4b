"""What `compare` adds: the command `troupe compare`, the section of the same name, and what the report says of it."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="compare",
    sections={"compare": "pipelines.extensions.compare.config:CompareConfig"},
    commands="pipelines.extensions.compare.command:add_to",
    reports="pipelines.extensions.compare.report:part",
)
