"""What `mcp_server` adds: routes of the gateway."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="mcp_server", routes="serve_apps.extensions.mcp_server.mcp_api:add_to")
