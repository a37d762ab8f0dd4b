"""What `samples` adds: the section `Episodes` of the report, and `samples` in report.json."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="samples", reports="pipelines.extensions.samples.shown:part")
