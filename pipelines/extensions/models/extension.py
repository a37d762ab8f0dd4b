"""What `models` adds: the commands `troupe model get`, `convert` and `check`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="models", commands="pipelines.extensions.models.command:add_to")
