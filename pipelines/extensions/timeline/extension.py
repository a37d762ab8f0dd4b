"""What `timeline` adds: a section of the report, the largest waits in the terminal, and timeline.json."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="timeline", reports="pipelines.extensions.timeline.report:part")
