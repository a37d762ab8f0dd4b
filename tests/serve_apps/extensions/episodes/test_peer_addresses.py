"""How a gateway replica finds the addresses of the others, also while one of them is in no list."""

from __future__ import annotations

import asyncio

import pytest

from serve_apps.extensions.episodes.episode_api import LOOKUP_INTERVAL_S, LOOKUP_TIMEOUT_S, PeerAddresses
from serve_apps.gateway.traffic.peer_replicas import Status

pytestmark = [pytest.mark.test, pytest.mark.anyio]
A, B = ({"replica": name, "address": f"http://{name}"} for name in "ab")


class Listed:
    """PeerReplicas with a list for each lookup; the last list is repeated."""

    def __init__(self, *lists: list[Status]) -> None:
        self.lists, self.num = lists, 0

    async def statuses(self) -> list[Status]:
        self.num += 1
        await asyncio.sleep(0.01)
        return self.lists[min(self.num, len(self.lists)) - 1]


async def test_a_replica_that_is_missing_during_a_route_change_is_found_when_it_is_back() -> None:
    listed = Listed([A], [A], [A, B])
    assert await PeerAddresses(listed).find("b") == "http://b"
    assert listed.num == 3


async def test_a_known_address_is_kept_while_another_replica_is_looked_up() -> None:
    listed = Listed([A], [B])
    addresses = PeerAddresses(listed)
    assert [await addresses.find(name) for name in ("a", "b", "a")] == ["http://a", "http://b", "http://a"]
    assert listed.num == 2


async def test_concurrent_lookups_of_a_replica_that_is_gone_share_their_requests() -> None:
    listed = Listed([A], [])
    addresses = PeerAddresses(listed)
    await addresses.find("a")
    addresses.forget("a")
    assert await asyncio.gather(*(addresses.find("a") for _ in range(200))) == [None] * 200
    assert 1 < listed.num <= 2 + LOOKUP_TIMEOUT_S / LOOKUP_INTERVAL_S
