"""waits: a test waits for a condition, up to a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(holds: Callable[[], object], *, timeout_s: float = TIMEOUT_S) -> None:
    """Returns as soon as the condition holds. TimeoutError where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)


async def until(holds: Callable[[], object], *, timeout_s: float = TIMEOUT_S) -> None:
    """Does the same while the event loop goes on."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)
