"""peer_replicas: one gateway replica -> the status of its peers, and the address of each.

All replicas of a machine listen on one port, and the kernel distributes connections among them. An open episode is known to
one replica only, so the others send its calls to that replica's own address. Addresses come from the statuses of the replicas
and from nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from serve_apps.policy.replicas import statuses_of

LOOKUP_TIMEOUT_S = 1.0
"""How long an unknown replica is looked for: while its route changes it is in no list (serve_apps/policy/replicas.py)."""
LOOKUP_INTERVAL_S = 0.1
"""Least time between two lookups, whoever asks for whichever replica."""
STATUS_TIMEOUT_S = 2.0

Status = dict[str, Any]
"""`Service.status` and what `Gateway.status` adds to it."""


class PeerReplicas(Protocol):
    """The replicas of one gateway, as one of them sees them."""

    async def statuses(self) -> list[Status]:
        """Returns the status of every replica that answers in time; the replica that asks may be among them."""
        ...


class ServePeers:
    """PeerReplicas over Ray Serve."""

    def __init__(self, app: str) -> None:
        self._app = app

    async def statuses(self) -> list[Status]:
        """See PeerReplicas; returns none where Serve does not answer in time."""
        try:
            return await asyncio.to_thread(statuses_of, self._app, timeout_s=STATUS_TIMEOUT_S)
        except TimeoutError:
            return []


class PeerAddresses:
    """Finds the own address of each replica and remembers it."""

    def __init__(self, peers: PeerReplicas | None) -> None:
        self._peers = peers
        self._known: dict[str, str] = {}
        self._looked_up_at = -LOOKUP_INTERVAL_S
        self._lookup = asyncio.Lock()

    async def find(self, replica: str) -> str | None:
        """Returns `http://HOST:PORT` of a replica by its name; None where no such replica appears within `LOOKUP_TIMEOUT_S`."""
        deadline = time.monotonic() + LOOKUP_TIMEOUT_S
        while replica not in self._known and time.monotonic() < deadline:
            await self._look_up()
        return self._known.get(replica)

    async def _look_up(self) -> None:
        """Asks once for all who wait, or waits until the next lookup is due.

        Known addresses stay known, also those of replicas that are not in the list now.
        """
        async with self._lookup:
            if time.monotonic() > self._looked_up_at + LOOKUP_INTERVAL_S:
                statuses = [] if self._peers is None else await self._peers.statuses()
                self._known |= {status["replica"]: status["address"] for status in statuses}
                self._looked_up_at = time.monotonic()
                return
        await asyncio.sleep(LOOKUP_INTERVAL_S)

    def forget(self, replica: str) -> None:
        """Drops an address at which the replica does not answer."""
        self._known.pop(replica, None)
