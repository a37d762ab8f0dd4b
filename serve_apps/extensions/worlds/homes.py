"""homes: an environment -> a world of it, in a worker process or on an OpenEnv server."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.workers import workers_of
from serve_apps.worlds.world import Session


def session_of(environment: Environment) -> AbstractAsyncContextManager[Session]:
    """Gives a world that has not begun yet; it is closed at the end of the block."""
    if not environment.url:
        return workers_of(environment).session()
    from serve_apps.extensions.worlds.openenv import openenv_session  # its client takes long to import, and few need it

    return openenv_session(environment)


async def reach(environment: Environment) -> None:
    """Raises ToolFault at once where a server takes no connection."""
    if environment.url:
        from serve_apps.extensions.worlds.openenv import reach as reach_server

        await reach_server(environment)
