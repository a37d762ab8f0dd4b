"""tasks: seed, split, count -> tasks like `7+6*8`, small enough for a model of less than a million parameters.

Which split a problem belongs to is decided by a hash of the problem alone (`b*c` and `c*b` count as one), so that
splits never overlap, whatever the seeds and counts.
"""

from __future__ import annotations

import random

from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.66, "gate": 0.12, "test": 0.18, "sentinel": 0.04}
"""Approximate share of all problems in each split."""


def generate(
    *,
    seed: int,
    split: str,
    count: int,
    max_a: int = 49,
    max_factor: int = 9,
    template: str = "{a}+{b}*{c}",
) -> list[Task]:
    """Returns `count` different tasks of `split` in an order that `seed` decides; 1 <= a <= `max_a`, 1 <= b, c <= `max_factor`.

    Raises ValueError for an unknown split, a template that lacks a placeholder, or more tasks than the split holds.
    """
    if split not in SHARES:
        raise ValueError(f"arithmetic: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    if not all(place in template for place in ("{a}", "{b}", "{c}")):
        raise ValueError(f"arithmetic: template {template!r} must hold {{a}}, {{b}} and {{c}}")
    factors = range(1, max_factor + 1)
    problems = [(a, b, c) for a in range(1, max_a + 1) for b in factors for c in factors if split_of(a, b, c) == split]
    if count > len(problems):
        raise ValueError(
            f"arithmetic: split {split!r} holds {len(problems)} tasks with max_a {max_a} and max_factor {max_factor}, "
            f"{count} were asked for: lower `count`, or raise `max_a` or `max_factor`"
        )
    chosen = random.Random(f"{seed}/{split}").sample(problems, count)
    return [_task(a, b, c, template) for a, b, c in chosen]


def split_of(a: int, b: int, c: int) -> str:
    """Returns the split of a problem, which does not depend on seed, range or machine."""
    return part_of(_family(a, b, c), SHARES, rest="train")


def _family(a: int, b: int, c: int) -> str:
    """Returns what a problem has in common with the one whose factors are exchanged."""
    return f"{a}+{min(b, c)}*{max(b, c)}"


def _task(a: int, b: int, c: int, template: str) -> Task:
    prompt = template.replace("{a}", str(a)).replace("{b}", str(b)).replace("{c}", str(c))
    return Task(
        task_id=f"arithmetic-{a}+{b}*{c}",
        prompt=prompt,
        answers=(str(a + b * c),),
        source="arithmetic",
        metadata={FAMILY: _family(a, b, c)},
    )
