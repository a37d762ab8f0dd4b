"""What `maintain` adds: the command `troupe maintain`, and with it the DAG `maintain_stores`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="maintain", commands="pipelines.extensions.maintain.command:add_to")
