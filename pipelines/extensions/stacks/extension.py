"""What `stacks` adds: the stacks of all processes of a run that a stage hangs in, on every node."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="stacks", stacks="pipelines.extensions.stacks.stacks:add_stacks")
