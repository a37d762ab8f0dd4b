"""tasks: seed, split, count -> wishes, each of which some product of the catalogue fulfils; no two splits share a wish."""

from __future__ import annotations

import random

from pipelines.examples.shop.world import make_wish
from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.55, "gate": 0.2, "test": 0.2, "sentinel": 0.05}
"""Approximate share of all wishes, whatever their highest price, in each split."""
MAX_SEED = 10**9


def generate(*, seed: int, split: str, count: int, catalogue: int = 0) -> list[Task]:
    """Returns `count` tasks of `split`, wishes of products of one catalogue.

    Raises ValueError for an unknown split, or more tasks than can be drawn.
    """
    if split not in SHARES:
        raise ValueError(f"shop: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    dice = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    for _ in range(60 * count):
        number = dice.randrange(MAX_SEED)
        wish = make_wish(number, catalogue)
        family = f"{catalogue}/{wish.kind}/{wish.attribute}/{wish.color}"
        if part_of(family, SHARES, rest="train") == split:
            metadata = {"seed": number, "catalogue": catalogue, FAMILY: family}
            task = Task(
                task_id=f"shop-{catalogue}-{wish.kind}-{wish.attribute}-{wish.color}-{wish.most}",
                prompt=str(wish),
                answers=("1",),
                source="shop",
                metadata=metadata,
            )
            tasks.setdefault(task.task_id, task)
        if len(tasks) == count:
            return list(tasks.values())
    raise ValueError(
        f"shop: split {split!r} gave {len(tasks)} tasks of {count}: lower `count`, or use another catalogue, too"
    )
