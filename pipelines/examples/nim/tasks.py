"""tasks: seed, split, count -> beginnings of the game; no two splits share a set of heaps.

Each can be won by the challenger, who begins where the heaps are won by who begins, and else comes second.

`demonstrate`: agent, task, inputs -> a completion: it plays both players of Nim, often without a thought.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from itertools import product

from pipelines.examples.nim.workflow import CHALLENGER, RIVAL
from pipelines.examples.nim.world import NAMES, best_move, is_won_by_who_begins
from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.5, "gate": 0.22, "test": 0.22, "sentinel": 0.06}
"""Approximate share of all sets of heaps, in any order, in each split."""


def generate(*, seed: int, split: str, count: int, most: int = 9) -> list[Task]:
    """Returns `count` tasks of `split` with three heaps of 1 to `most` matches, in an order that `seed` decides.

    Raises ValueError for an unknown split, or more tasks than there are.
    """
    if split not in SHARES:
        raise ValueError(f"nim: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    heaps = [h for h in product(range(1, most + 1), repeat=3) if part_of(_family(h), SHARES, rest="train") == split]
    if count > len(heaps):
        raise ValueError(
            f"nim: split {split!r} has {len(heaps)} tasks of heaps up to {most}, not {count}: raise `most`"
        )
    random.Random(f"{seed}/{split}").shuffle(heaps)
    return [_task(one) for one in heaps[:count]]


def _family(heaps: tuple[int, ...]) -> str:
    """Returns what a beginning has in common with those whose heaps lie in another order."""
    return repr(sorted(heaps))


def _task(heaps: tuple[int, ...]) -> Task:
    players = [CHALLENGER, RIVAL] if is_won_by_who_begins(heaps) else [RIVAL, CHALLENGER]
    return Task(
        task_id=f"nim-{'-'.join(map(str, heaps))}",
        prompt=f"Win from {' '.join(map(str, heaps))}",
        answers=(CHALLENGER,),
        source="begins" if players[0] == CHALLENGER else "second",
        metadata={"heaps": list(heaps), "players": players, FAMILY: _family(heaps)},
    )


SHARE_BEST = 0.3


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of either agent for these inputs; the same `rng` state gives the same text."""
    heaps = [int(number) for number in re.findall(r"\d+", inputs["see"])]
    return f"<MOVE>{best_move(heaps) if rng.random() < SHARE_BEST else _any_move(heaps, rng)}</MOVE>"


def _any_move(heaps: list[int], rng: random.Random) -> str:
    name, heap = rng.choice([(name, heap) for name, heap in zip(NAMES, heaps, strict=True) if heap])
    return f"take {rng.randint(1, heap)} from {name}"
