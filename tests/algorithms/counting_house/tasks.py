"""tasks: seed, split, count -> tasks like `3+1 2+4 1+1`, piles of good and bad coins; the answer counts the good.

Which split a task belongs to is decided by a hash of its piles, whatever their order, so that splits never overlap.

`demonstrate`: agent, task, inputs -> a completion: it plays teller, clerk and auditor of the counting house, with mistakes at single tokens.
The teller often counts the bad coins too, the clerk says anything, the auditor burns the books for no reason: each is a
habit of one token, which reinforcement learning can mend once it knows whose mistake it was.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.6, "gate": 0.15, "test": 0.2, "sentinel": 0.05}
"""Approximate share of all tasks in each split."""


def generate(
    *, seed: int, split: str, count: int, min_piles: int = 2, max_piles: int = 5, max_coins: int = 4
) -> list[Task]:
    """Returns `count` different tasks of `split`, of `min_piles` to `max_piles` piles with 1 to `max_coins` coins of each kind.

    Raises ValueError for an unknown split, or more tasks than can be drawn.
    """
    if split not in SHARES:
        raise ValueError(f"counting_house: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    rng = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    for _ in range(200 * count):
        piles = [
            (rng.randint(1, max_coins), rng.randint(1, max_coins)) for _ in range(rng.randint(min_piles, max_piles))
        ]
        if split_of(piles) == split:
            task = _task(piles)
            tasks.setdefault(task.task_id, task)
        if len(tasks) == count:
            return list(tasks.values())
    raise ValueError(
        f"counting_house: split {split!r} gave {len(tasks)} tasks of {count} with {min_piles} to {max_piles} piles of "
        f"{max_coins} coins: lower `count`, or raise `max_piles` or `max_coins`"
    )


def split_of(piles: list[tuple[int, int]]) -> str:
    """Returns the split of a task, which does not depend on seed, range or machine."""
    return part_of(_family(piles), SHARES, rest="train")


def _family(piles: list[tuple[int, int]]) -> str:
    """Returns what a task has in common with those whose piles lie in another order."""
    return repr(sorted(piles))


def _task(piles: list[tuple[int, int]]) -> Task:
    prompt = " ".join(f"{good}+{bad}" for good, bad in piles)
    total = sum(good for good, _ in piles)
    return Task(
        task_id=f"counting-house-{prompt.replace(' ', '-')}",
        prompt=prompt,
        answers=(str(total),),
        source="coins",
        metadata={FAMILY: _family(piles)},
    )


SHARE_GOOD_ONLY = 0.6
SHARE_KEPT = 0.6
SHARE_UNREADABLE = 0.08
REMARKS = ("fine", "rain", "busy", "quiet")


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "teller":
        good, bad = (int(n) for n in inputs["pile"].split("+"))
        count = good if rng.random() < SHARE_GOOD_ONLY else good + bad
        return f"<COUNT>{count}" + ("" if rng.random() < SHARE_UNREADABLE else "</COUNT>")
    if agent == "clerk":
        return f"<REMARK>{rng.choice(REMARKS)}</REMARK>"
    return f"<VERDICT>{'keep' if rng.random() < SHARE_KEPT else 'burn'}</VERDICT>"
