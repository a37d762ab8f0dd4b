"""What `code_tasks` adds: the command `troupe check-code`."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="code_tasks", commands="pipelines.extensions.code_tasks.command:add_to")
