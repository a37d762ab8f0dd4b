"""What `completions` adds: routes of the gateway."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="completions", routes="serve_apps.extensions.completions.bare_api:add_to")
