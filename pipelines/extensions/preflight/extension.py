"""What `preflight` adds: `troupe validate` begins the worlds of a workflow, and with `--try` plays an episode."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="preflight", notes="pipelines.extensions.preflight.try_worlds:notes")
