"""preflight: the environments of a workflow -> a line for each, after one world of it has begun and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from serve_apps.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.worlds.environment import Environment
from serve_apps.worlds.seen import checked
from serve_apps.worlds.world import session_of


def try_environments(environments: Mapping[str, Environment]) -> list[str]:
    """Returns a line per environment. Raises ValueError with the name of the first whose world does not begin."""
    return [asyncio.run(_tried(name, environment)) for name, environment in environments.items()]


async def _reach(environment: Environment) -> None:
    """Says at once that nothing answers at an address, for which an episode would wait as long as a world may take to begin."""
    from serve_apps.worlds.openenv import reach  # its client takes long to import, and few need it

    await reach(environment)


async def _tried(name: str, environment: Environment) -> str:
    began = time.perf_counter()
    try:
        if environment.url:
            await _reach(environment)
        async with session_of(environment) as session:
            checked(await session.reset(dict(environment.example)), environment, before="")
    except (ToolFault, ToolRaised, AuthorError) as fault:
        raise ValueError(
            f"environment {name}: no world begins with the settings example = {dict(environment.example)}, which its "
            f"declaration gives for this check: {fault}"
        ) from None
    seconds = time.perf_counter() - began
    where = (
        environment.url or f"{environment.workers} worker{'s' * (environment.workers != 1)} of {environment.factory}"
    )
    return f"environment {name}: {where}, first world in {seconds:.1f} s"
