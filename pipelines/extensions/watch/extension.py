"""What `watch` adds: the command `troupe watch`, the section of the same name, and a check of every iteration."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="watch",
    sections={"watch": "pipelines.extensions.watch.config:WatchConfig"},
    commands="pipelines.extensions.watch.command:add_to",
    records="pipelines.extensions.watch.shown:found",
    reports="pipelines.extensions.watch.shown:part",
    holds="pipelines.extensions.watch.watching:held",
)
