"""doubling_team: the pair of agents with a tool between them, as a workflow that a team file can name."""

from __future__ import annotations

from pair import Pair

from serve_apps.authoring.agent import Tool


async def double(number: str) -> str:
    """Doubles a number."""
    return str(2 * int(number))


class Doubling(Pair):
    """A pair whose tool doubles."""

    def __init__(self) -> None:
        super().__init__(Tool(double, timeout_s=1))
