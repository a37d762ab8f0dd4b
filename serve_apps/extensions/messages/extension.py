"""What `messages` adds: routes of the gateway."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="messages", routes="serve_apps.extensions.messages.messages_api:add_to")
