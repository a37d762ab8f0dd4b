"""What `worlds` adds: the homes of worlds."""

from __future__ import annotations

from stores.extensions import Extension

EXTENSION = Extension(name="worlds", worlds="serve_apps.extensions.worlds.homes")
