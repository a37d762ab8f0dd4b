"""What `form` adds: a section of the report, and `form` in report.json."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="form", reports="pipelines.extensions.form.form:part")
