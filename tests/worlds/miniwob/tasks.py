"""tasks: seed, split, count -> pages of MiniWoB++ with the seeds of what they ask; no two splits share one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelines.tasks.splits import draw_tasks, part_of
from stores.types import FAMILY, Task

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

    def draw(dice: random.Random, num_tasks: int) -> Task | None:
        page, number = pages[num_tasks % len(pages)], dice.randrange(MAX_SEED)
        return _task(page, number) if part_of(_family(page, number), SHARES, rest="train") == split else None

    return draw_tasks(draw, seed=seed, split=split, count=count)


def _family(page: str, seed: int) -> str:
    return f"{page}/{seed}"


def _task(page: str, seed: int) -> Task:
    return Task(
        task_id=f"miniwob-{page}-{seed}",
        prompt=PROMPT,
        answers=("1",),
        source=page,
        metadata={"page": page, "seed": seed, FAMILY: _family(page, seed)},
    )
