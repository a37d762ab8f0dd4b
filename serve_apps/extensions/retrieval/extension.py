"""What `retrieval` adds: the commands `troupe corpus` and `retriever`, and the key `retriever` of a tool of a declared workflow."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="retrieval",
    commands="serve_apps.extensions.retrieval.command:add_to",
    tools={"retriever": "serve_apps.extensions.retrieval.retrieval:declared_tool"},
)
