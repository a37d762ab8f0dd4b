"""What `mcp_tools` adds: the key `mcp` of a tool of a declared workflow."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="mcp_tools",
    tools={"mcp": "serve_apps.extensions.mcp_tools.mcp_tools:declared_tool"},
)
