"""worlds: what a worker adds to a step of a world, steps per second of one process that plays episodes, and memory of a worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil

from pipelines.examples.household.world import House
from serve_apps.authoring.environment import Environment
from serve_apps.extensions.worlds.workers import WorldWorkers
from tests.bench.figures import Figure

NUM_STEPS, NUM_WORLDS = 4000, 16
WORLDS: dict[str, dict[str, Any]] = {"pipelines.examples.household.world:House": {"kind": "put"}}


def measure(folder: Path) -> list[Figure]:
    """Steps the household, in workers and bare."""
    return asyncio.run(_measured())


async def _measured() -> list[Figure]:
    figures = []
    bare_s = _bare()
    for factory, settings in WORLDS.items():
        name = factory.split(".")[2]
        workers = WorldWorkers(Environment(factory))
        try:
            began = time.perf_counter()
            await _played(workers, 0, settings, 0)
            first_s = time.perf_counter() - began
            step_s = await _played(workers, 1, settings, NUM_STEPS)
            began = time.perf_counter()
            await asyncio.gather(*(_played(workers, n, settings, NUM_STEPS // NUM_WORLDS) for n in range(NUM_WORLDS)))
            rate = NUM_STEPS / (time.perf_counter() - began)
            mib = psutil.Process(workers.workers[0].pid).memory_info().rss / 2**20
        finally:
            workers.end()
        note = f"bare: {1e3 * bare_s:.3f} ms" if name == "household" else ""
        figures += [
            Figure(f"{name}: a step in a worker (ms)", 1e3 * step_s, most=1.0, note=note),
            Figure(f"{name}: steps per second, {NUM_WORLDS} worlds of one worker", rate),
            Figure(f"{name}: the first world (s)", first_s),
            Figure(f"{name}: memory of a worker (MiB)", mib),
        ]
    return figures


async def _played(workers: WorldWorkers, seed: int, settings: dict[str, Any], num_steps: int) -> float:
    """The seconds of one step."""
    async with workers.session() as world:
        await world.reset({"seed": seed, **settings})
        began = time.perf_counter()
        for _ in range(num_steps):
            await world.step("look")
        return (time.perf_counter() - began) / max(1, num_steps)


def _bare() -> float:
    house = House(seed=1, kind="put")
    house.reset()
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        house.step("look")
    return (time.perf_counter() - began) / NUM_STEPS
