"""What `why` adds: the command `troupe why`, and what `troupe show` and the report say of what it found."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="why",
    commands="pipelines.extensions.why.command:add_to",
    reports="pipelines.extensions.why.shown:part",
    shows="pipelines.extensions.why.shown:shown",
)
