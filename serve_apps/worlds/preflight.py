"""preflight: the environments of a workflow -> a line for each, after one world of it has begun and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.authoring.environment import Environment
from serve_apps.worlds.seen import checked
from serve_apps.worlds.world import session_of


def try_servers(environments: Mapping[str, Environment]) -> None:
    """Raises ValueError at once where nothing answers at an address, for which an episode would wait as long as a world may take to begin."""
    for name, environment in environments.items():
        if environment.url:
            from serve_apps.worlds.openenv import reach  # its client takes long to import, and few need it

            try:
                asyncio.run(reach(environment))
            except ToolFault as fault:
                raise ValueError(f"environment {name}: {fault}") from None


def try_environments(environments: Mapping[str, Environment]) -> list[str]:
    """Returns a line per environment. Raises ValueError with the name of the first whose world does not begin."""
    return [asyncio.run(_tried(name, environment)) for name, environment in environments.items()]


async def _tried(name: str, environment: Environment) -> str:
    began = time.perf_counter()
    try:
        async with session_of(environment) as session:
            checked(await session.reset(dict(environment.example)), environment, before="")
    except (ToolFault, ToolRaised, AuthorError) as fault:
        raise ValueError(
            f"environment {name}: the tasks that were tried opened no world of it, and none begins with the settings example = "
            f"{dict(environment.example)} of its declaration: {fault}"
        ) from None
    return f"environment {name}: its example began in {time.perf_counter() - began:.1f} s"
