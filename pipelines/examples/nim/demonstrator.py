"""demonstrator: agent, task, inputs -> a completion: it plays both players of Nim, often without a thought."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from pipelines.examples.nim.world import NAMES, best_move
from stores.types import Task

SHARE_BEST = 0.3


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of either agent for these inputs; the same `rng` state gives the same text."""
    heaps = [int(number) for number in re.findall(r"\d+", inputs["see"])]
    return f"<MOVE>{best_move(heaps) if rng.random() < SHARE_BEST else _any_move(heaps, rng)}</MOVE>"


def _any_move(heaps: list[int], rng: random.Random) -> str:
    name, heap = rng.choice([(name, heap) for name, heap in zip(NAMES, heaps, strict=True) if heap])
    return f"take {rng.randint(1, heap)} from {name}"
