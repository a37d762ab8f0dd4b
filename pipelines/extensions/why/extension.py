"""What `why` adds: the command `troupe why`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="why", commands="pipelines.extensions.why.command:add_to")
