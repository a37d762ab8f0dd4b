"""What `responses` adds: routes of the gateway, and of the episodes of programs."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(
    name="responses",
    routes="serve_apps.extensions.responses.responses_api:add_to",
    episode_routes="serve_apps.extensions.responses.episode_responses:add_to",
)
