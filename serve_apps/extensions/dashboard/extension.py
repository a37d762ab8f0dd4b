"""What `dashboard` adds: routes of the gateway."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="dashboard", routes="serve_apps.extensions.dashboard.dashboard_api:add_to")
