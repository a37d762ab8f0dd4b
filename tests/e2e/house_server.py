"""house_server: the household game behind OpenEnv's `/ws`, and the workflow that plays it there.

python -m tests.e2e.house_server PORT
"""

from __future__ import annotations

import asyncio
import sys

from pipelines.examples.household.workflow import Household
from pipelines.examples.household.world import House
from serve_apps.authoring.environment import Environment
from tests.serve_apps.extensions.worlds.openenv_server import serving

NUM_PLACES = 64


class RemoteHousehold(Household):
    """The same agents and control flow, in rooms of a server."""

    def __init__(self, url: str) -> None:
        """Args: url: `http://host:port`."""
        self.environments = {"home": Environment(url=url, max_steps=14, example={"seed": 0, "kind": "put"})}


async def _serve(port: int) -> None:
    async with serving(House, port=port, capacity=NUM_PLACES):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
