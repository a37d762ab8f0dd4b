"""What `lineage` adds: the command `troupe lineage`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="lineage", commands="pipelines.extensions.lineage.command:add_to")
