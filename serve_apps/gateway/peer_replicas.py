"""siblings: one gateway replica -> what the others are like, and where they are reached by themselves.

All replicas of a machine listen on one port, and the kernel deals connections to them: what only one of them knows, an
open episode, is asked of it at an address of its own. Nobody else names addresses: they come from the replicas' statuses.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from serve_apps.policy.replicas import statuses_of

PATIENCE_S = 1.0
"""How long a replica that is not known is looked for: while its route changes it is on nobody's list (serve_apps/policy/replicas.py)."""
LOOK_S = 0.1
"""Between two looks, whoever asks for whichever replica."""
STATUS_TIMEOUT_S = 2.0

Status = dict[str, Any]
"""`Service.status` and what `Gateway.status` adds to it."""


class Siblings(Protocol):
    """The replicas of one gateway."""

    async def statuses(self) -> list[Status]:
        """Of all that answer in time, the one that asks among them or not."""
        ...


class Alone:
    """A replica without siblings."""

    async def statuses(self) -> list[Status]:
        """See Siblings."""
        return []


class ServeSiblings:
    """Siblings over Ray Serve."""

    def __init__(self, app: str) -> None:
        self._app = app

    async def statuses(self) -> list[Status]:
        """See Siblings."""
        try:
            return await asyncio.to_thread(statuses_of, self._app, timeout_s=STATUS_TIMEOUT_S)
        except TimeoutError:
            return []


class Addresses:
    """Where each replica is reached by itself."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._known: dict[str, str] = {}
        self._looked_at = -LOOK_S
        self._looking = asyncio.Lock()

    async def of(self, replica: str) -> str | None:
        """`http://HOST:PORT` of a replica by name; None where none of that name was found in `PATIENCE_S`."""
        gives_up_at = time.monotonic() + PATIENCE_S
        while replica not in self._known and time.monotonic() < gives_up_at:
            await self._look()
        return self._known.get(replica)

    async def _look(self) -> None:
        """One look for all who wait, or a pause until the next; what is known stays, on the list or not."""
        async with self._looking:
            if time.monotonic() > self._looked_at + LOOK_S:
                self._known |= {status["replica"]: status["address"] for status in await self._siblings.statuses()}
                self._looked_at = time.monotonic()
                return
        await asyncio.sleep(LOOK_S)

    def forget(self, replica: str) -> None:
        """It does not answer there."""
        self._known.pop(replica, None)
