"""tasks: seed, split, count -> pages of MiniWoB++ with the seeds of what they ask; no two splits share one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelines.tasks.splits import part_of
from stores.types import Task

PAGES = ("click-test-2", "click-button", "enter-text", "click-checkboxes")
"""Those that the demonstrator knows."""
PROMPT = "Do what the page asks."
SHARES = {"train": 0.5, "gate": 0.22, "test": 0.22, "sentinel": 0.06}
"""Approximate share of all seeds of a page in each split."""
MAX_SEED = 10**6


def generate(*, seed: int, split: str, count: int, pages: Sequence[str] = PAGES) -> list[Task]:
    """Returns `count` tasks of `split`, the pages in turn. Raises ValueError for an unknown split, or without pages."""
    if split not in SHARES:
        raise ValueError(f"miniwob: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    if not pages:
        raise ValueError("miniwob: pages = []: name some, click-button for example")
    dice = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        page, number = pages[len(tasks) % len(pages)], dice.randrange(MAX_SEED)
        if part_of(f"{page}/{number}", SHARES, rest="train") == split:
            metadata = {"page": page, "seed": number}
            task = Task(
                task_id=f"miniwob-{page}-{number}", prompt=PROMPT, answers=("1",), source=page, metadata=metadata
            )
            tasks.setdefault(task.task_id, task)
    return list(tasks.values())
