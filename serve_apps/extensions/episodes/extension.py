"""What `episodes` adds: routes of the gateway."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="episodes", routes="serve_apps.extensions.episodes.episode_api:add_to")
