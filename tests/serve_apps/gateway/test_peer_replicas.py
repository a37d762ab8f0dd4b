"""Where a gateway replica finds the others, also while one of them is on nobody's list."""

from __future__ import annotations

import asyncio

import pytest

from serve_apps.gateway.peer_replicas import LOOK_S, PATIENCE_S, Addresses, Status

pytestmark = pytest.mark.anyio
A, B = ({"replica": name, "address": f"http://{name}"} for name in "ab")


class Listed:
    """What is on the list at each look; the last one again and again."""

    def __init__(self, *looks: list[Status]) -> None:
        self.looks, self.num = looks, 0

    async def statuses(self) -> list[Status]:
        self.num += 1
        await asyncio.sleep(0.01)
        return self.looks[min(self.num, len(self.looks)) - 1]


async def test_a_replica_that_takes_a_new_route_is_found_when_it_is_back() -> None:
    listed = Listed([A], [A], [A, B])
    assert await Addresses(listed).of("b") == "http://b"
    assert listed.num == 3


async def test_a_replica_that_is_known_stays_so_while_another_is_looked_for() -> None:
    listed = Listed([A], [B])
    addresses = Addresses(listed)
    assert [await addresses.of(name) for name in ("a", "b", "a")] == ["http://a", "http://b", "http://a"]
    assert listed.num == 2


async def test_one_that_is_gone_is_looked_for_anew_by_all_who_wait_together() -> None:
    listed = Listed([A], [])
    addresses = Addresses(listed)
    await addresses.of("a")
    addresses.forget("a")
    assert await asyncio.gather(*(addresses.of("a") for _ in range(200))) == [None] * 200
    assert 1 < listed.num <= 2 + PATIENCE_S / LOOK_S
