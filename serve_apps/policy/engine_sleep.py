"""engine_sleep: an engine lends its GPU's memory to a trainer until a deadline, and takes it back (`pool: shared`).

    awake ──sleep(until)──> asleep: weights in the host's memory, KV cache dropped, requests wait
      ^                        │
      └── wake(), or the deadline: as soon as the GPU has room again

An engine on a CPU has nothing to lend: it stops sampling while it sleeps, and keeps its memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from serve_apps.engines.port import Engine, EngineDeadError

logger = logging.getLogger(__name__)

ASLEEP_UNTIL = "asleep_until"
"""The key in an app's `user_config` and in the status of a replica; a Unix time in seconds, None while it is awake."""
CANNOT_WAKE = "cannot_wake"
"""The key in the status of a replica: why it cannot wake although it should; empty where nothing is wrong."""
RETRY_S = 1.0
"""How long an engine without room on its GPU waits before it looks again."""


class EngineSleep:
    """Puts one engine to sleep and wakes it. Every method raises EngineDeadError when the engine is gone."""

    def __init__(self, engine: Engine) -> None:
        """Takes the engine as it is, awake."""
        self._engine = engine
        self._until: float | None = None
        self._should_sleep = False
        self._cannot_wake = ""
        self._lent: list[int] = []
        """The bytes that every worker of the engine gave up when it fell asleep."""
        self._turn = asyncio.Lock()
        self._alarm: asyncio.Task[None] | None = None

    @property
    def is_asleep(self) -> bool:
        """Returns whether the engine answers nothing until it wakes."""
        return self._until is not None

    def status(self) -> dict[str, Any]:
        """Returns plain values for the status of the replica."""
        return {ASLEEP_UNTIL: self._until, CANNOT_WAKE: self._cannot_wake}

    def expect(self, *, is_asleep: bool) -> None:
        """Says what is wanted next, so that an engine that waits for room to wake gives that up."""
        self._should_sleep = is_asleep

    async def sleep(self, until: float) -> None:
        """Frees the GPU; requests under way are frozen and begin again when the engine wakes, new ones wait.

        Args: until: a Unix time in seconds at which the engine wakes by itself: nobody else may be left to wake it.
        """
        self.expect(is_asleep=True)
        async with self._turn:
            if not self.is_asleep:
                before = await self._engine.free_bytes()
                await self._engine.sleep()
                after = await self._engine.free_bytes()
                self._lent = [b - a for a, b in zip(before, after, strict=True)]
                logger.info("sleeps; it lends %s GiB", ", ".join(f"{_gib(lent):.1f}" for lent in self._lent))
            self._until, self._cannot_wake = until, ""
        if self._alarm is None:
            self._alarm = asyncio.ensure_future(self._wake_in_time())

    async def wake(self) -> None:
        """Takes the GPU's memory back as soon as it is free, with an empty cache and the weights of before.

        Returns early, still asleep, when `expect(is_asleep=True)` is called meanwhile.
        """
        self.expect(is_asleep=False)
        await self._wake_while(lambda: not self._should_sleep)

    async def _wake_while(self, is_wanted: Callable[[], bool]) -> None:
        while self.is_asleep and is_wanted():
            async with self._turn:
                if self.is_asleep and is_wanted():
                    self._cannot_wake = await self._try_to_wake()
            if self.is_asleep:
                await asyncio.sleep(RETRY_S)

    async def _try_to_wake(self) -> str:
        """Wakes the engine if every GPU of it has room; returns what is in the way."""
        free = await self._engine.free_bytes()
        if any(has < lent for has, lent in zip(free, self._lent, strict=True)):
            return (
                f"it needs {_gib(max(self._lent)):.1f} GiB of its GPU to wake and {_gib(min(free)):.1f} GiB are free: another "
                "process, such as a trainer at work, holds the rest"
            )
        try:
            await self._engine.wake()
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  an engine may turn every worker's exception into a plain Exception
            # The room was taken between the two calls. What woke by then stays awake, so that less is needed from now on.
            self._lent = [0] * len(self._lent)
            return str(error)
        self._until = None
        logger.info("is awake")
        return ""

    async def _wake_in_time(self) -> None:
        try:
            while self._until is not None:
                left = self._until - time.time()
                if left > 0:
                    await asyncio.sleep(min(left, RETRY_S))
                    continue
                logger.warning("nobody woke this engine before its deadline: it wakes by itself")
                await self._wake_while(self._is_late)
        finally:
            self._alarm = None

    def _is_late(self) -> bool:
        return self._until is not None and self._until <= time.time()


def _gib(size_bytes: float) -> float:
    return size_bytes / 2**30
