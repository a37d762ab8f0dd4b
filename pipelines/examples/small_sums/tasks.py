"""tasks: seed, split, count -> questions like `How much is 7 * 8?`, within reach of a pretrained model of 135M parameters.

The split of an expression depends on nothing else, so that splits never overlap, whatever the seeds and counts. `7 * 8` and
`8 * 7` count as one, and `7 + 8` and `8 + 7`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

from pipelines.tasks.splits import share_out
from stores.types import FAMILY, Task

SIZES = {"test": 200, "gate": 40, "train": 116}
"""Expressions in each split. Few are enough to train: each comes in every wording."""
WORDINGS = ("What is {x}?", "Calculate {x}.", "Solve {x}.", "How much is {x}?")


def generate(*, seed: int, split: str, count: int) -> list[Task]:
    """Returns `count` different tasks of `split` in an order that `seed` decides.

    A training task is an expression in one of four wordings. In the other splits an expression comes once, so that tasks
    are independent.

    Raises ValueError for an unknown split, or more tasks than the split holds.
    """
    if split not in SIZES:
        raise ValueError(f"small_sums: split {split!r} does not exist: use one of {', '.join(SIZES)}")
    tasks = [
        Task(
            task_id=f"small-sums-{wording}-{expression}",
            prompt=WORDINGS[wording].format(x=expression),
            answers=(str(value),),
            source="small_sums",
            metadata={FAMILY: _problem(expression)},
        )
        for expression, value, own_wording in _split(split)
        for wording in (range(len(WORDINGS)) if split == "train" else [own_wording])
    ]
    if count > len(tasks):
        raise ValueError(f"small_sums: split {split!r} holds {len(tasks)} tasks, {count} were asked for: lower `count`")
    return random.Random(f"{seed}/{split}").sample(tasks, count)


@cache
def _split(split: str) -> list[tuple[str, int, int]]:
    """Returns the split's expressions, each with its value and the wording that it has where it comes once."""
    draw = random.Random("small_sums")
    items = [(x, value, draw.randrange(len(WORDINGS))) for x, value in expressions()]
    return share_out(items, SIZES, problem=lambda item: _problem(item[0]), dice=draw)[split]


def _problem(expression: str) -> str:
    """Returns what an expression has in common with one whose numbers are exchanged and that has the same value."""
    a, sign, b = expression.split()
    first, second = (a, b) if sign == "-" else sorted((a, b))
    return f"{first} {sign} {second}"


def expressions() -> Iterator[tuple[str, int]]:
    """Yields every expression with its value: a + b, a - b > 0, a * b, with a up to 20 (12 for products) and b from 2 to 9."""
    for b in range(2, 10):
        yield from ((f"{a} + {b}", a + b) for a in range(2, 21))
        yield from ((f"{a} - {b}", a - b) for a in range(b + 1, 21))
        yield from ((f"{a} * {b}", a * b) for a in range(2, 13))


CHAINED_SIZES = {"test": 200, "gate": 40, "train": 700}
"""Tasks of two steps in each split."""


def generate_chained(*, seed: int, split: str, count: int) -> list[Task]:
    """Returns `count` different tasks of two steps, `What is 7 * 8 + 5?`, in an order that `seed` decides.

    The metadata name the steps: `first` (`7 * 8`) and `then` (`+ 5`).

    Raises ValueError for an unknown split, or more tasks than the split holds.
    """
    if split not in CHAINED_SIZES or count > CHAINED_SIZES[split]:
        raise ValueError(f"small_sums: split {split!r} with {count} tasks was asked for; there are {CHAINED_SIZES}")
    digits = range(2, 10)
    items = [(a, b, c, s) for a, b, c, s in product(digits, digits, digits, "+-") if s == "+" or a * b > c]
    parts = share_out(items, CHAINED_SIZES, problem=_chained_problem, dice=random.Random("chained_sums"))
    tasks = [
        Task(
            task_id=f"chained-sums-{a}-{b}-{sign}-{c}",
            prompt=f"What is {a} * {b} {sign} {c}?",
            answers=(str(a * b + (c if sign == "+" else -c)),),
            source="chained_sums",
            metadata={"first": f"{a} * {b}", "then": f"{sign} {c}", FAMILY: _chained_problem((a, b, c, sign))},
        )
        for a, b, c, sign in parts[split]
    ]
    return random.Random(f"{seed}/{split}").sample(tasks, count)


def _chained_problem(item: tuple[int, int, int, str]) -> str:
    """Returns what a chained sum has in common with the one whose factors are exchanged."""
    a, b, c, sign = item
    return f"{min(a, b)} * {max(a, b)} {sign} {c}"
