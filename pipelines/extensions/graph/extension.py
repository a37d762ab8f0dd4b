"""What `graph` adds: the command `troupe graph`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="graph", commands="pipelines.extensions.graph.command:add_to")
