"""peer_replicas: one gateway replica -> the status of its peers, with the address of each.

All replicas of a machine listen on one port, and the kernel distributes connections among them.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from serve_apps.policy.replicas import statuses_of

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
            return await asyncio.to_thread(statuses_of, self._app, timeout_s=STATUS_TIMEOUT_S, without_late=True)
        except TimeoutError:
            return []
