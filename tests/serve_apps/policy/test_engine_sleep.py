"""An engine that lends its GPU: it sleeps once, wakes when there is room, and by itself at its deadline. The engine is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_apps.engines.port import EngineDeadError
from serve_apps.policy import engine_sleep
from serve_apps.policy.engine_sleep import ASLEEP_UNTIL, CANNOT_WAKE, EngineSleep

pytestmark = pytest.mark.fast

GIB = 2**30


class FakeEngine:
    """Has 10 GiB of an 80 GiB GPU that another process uses, too."""

    def __init__(self) -> None:
        self.used, self.used_by_others = 10 * GIB, 0
        self.calls: list[str] = []
        self.faults: list[Exception] = []

    async def free_bytes(self) -> list[int]:
        return [80 * GIB - self.used - self.used_by_others]

    async def sleep(self) -> None:
        self.calls.append("sleep")
        self.used = GIB

    async def wake(self) -> None:
        self.calls.append("wake")
        if self.faults:
            raise self.faults.pop()
        self.used = 10 * GIB


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_sleep, "RETRY_S", 0.001)


def play(scene: Callable[[FakeEngine, EngineSleep], Awaitable[None]]) -> FakeEngine:
    engine = FakeEngine()

    async def whole() -> None:
        async with asyncio.timeout(5):
            await scene(engine, EngineSleep(engine))  # type: ignore[arg-type]

    asyncio.run(whole())
    return engine


async def reached(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_an_engine_sleeps_once_with_its_weights_kept_and_requests_waiting_however_often_it_is_told() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        until = time.time() + 100
        await sleep.sleep(until)
        await sleep.sleep(until + 1)
        assert sleep.status() == {ASLEEP_UNTIL: until + 1, CANNOT_WAKE: ""}
        await sleep.wake()
        await sleep.wake()
        assert sleep.status() == {ASLEEP_UNTIL: None, CANNOT_WAKE: ""}

    assert play(scene).calls == ["sleep", "wake"]


def test_an_engine_wakes_when_the_gpu_has_room_for_what_it_lent_and_says_until_then_what_is_in_the_way() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 100)
        engine.used_by_others = 71 * GIB  # 8 are free, 9 were lent
        waking = asyncio.ensure_future(sleep.wake())
        await reached(lambda: sleep.status()[CANNOT_WAKE])
        assert "needs 9.0 GiB of its GPU to wake and 8.0 GiB are free" in sleep.status()[CANNOT_WAKE]
        assert "wake" not in engine.calls
        engine.used_by_others = 70 * GIB
        await waking
        assert not sleep.is_asleep
        assert sleep.status()[CANNOT_WAKE] == ""

    play(scene)


def test_an_engine_that_nobody_wakes_wakes_by_itself_at_its_deadline() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 0.02)
        await reached(lambda: not sleep.is_asleep)
        await sleep.sleep(time.time() + 0.02)
        await reached(lambda: not sleep.is_asleep)

    assert play(scene).calls == ["sleep", "wake"] * 2


def test_a_deadline_that_is_put_off_in_time_wakes_nothing() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 0.02)
        await sleep.sleep(time.time() + 100)
        await asyncio.sleep(0.05)
        assert sleep.is_asleep

    assert play(scene).calls == ["sleep"]


def test_an_engine_that_waits_for_room_goes_on_sleeping_when_that_is_wanted_again() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 100)
        engine.used_by_others = 75 * GIB
        waking = asyncio.ensure_future(sleep.wake())
        await reached(lambda: sleep.status()[CANNOT_WAKE])
        later = time.time() + 200
        await sleep.sleep(later)
        await waking
        engine.used_by_others = 0
        await asyncio.sleep(0.01)
        assert sleep.status() == {ASLEEP_UNTIL: later, CANNOT_WAKE: ""}

    assert "wake" not in play(scene).calls


def test_a_waking_that_fails_is_tried_again_with_what_woke_by_then_counted_as_awake() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 100)
        engine.faults = [RuntimeError("CUDA out of memory")]
        engine.used_by_others = 70 * GIB
        await sleep.wake()
        assert not sleep.is_asleep

    assert play(scene).calls == ["sleep", "wake", "wake"]


def test_an_engine_that_dies_as_it_wakes_is_not_waited_for() -> None:
    async def scene(engine: FakeEngine, sleep: EngineSleep) -> None:
        await sleep.sleep(time.time() + 100)
        engine.faults = [EngineDeadError()]
        with pytest.raises(EngineDeadError):
            await sleep.wake()

    play(scene)
