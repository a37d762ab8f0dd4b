"""tasks: seed, split, count -> tasks to write a short function on two integers, with one public test and hidden ones.

"Write f(a, b): the sum of a and b, doubled."     def f(a, b): return (a + b) * 2

`demonstrate`: agent, task, inputs -> a completion: it plays the reflective code team on `small_functions`, as often wrong as a real base model.
Its habits: the planner forgets the second step, the coder takes a plan as it is, advice is given at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from hashlib import sha256
from itertools import product
from typing import Any

from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

FIRST: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "the sum of a and b": ("a + b", lambda a, b: a + b),
    "the product of a and b": ("a * b", lambda a, b: a * b),
    "a minus b": ("a - b", lambda a, b: a - b),
    "b minus a": ("b - a", lambda a, b: b - a),
    "the larger of a and b": ("max(a, b)", max),
    "the smaller of a and b": ("min(a, b)", min),
}
THEN: dict[str, tuple[str, Callable[[int], int]]] = {
    "doubled": ("{} * 2", lambda x: x * 2),
    "squared": ("{} ** 2", lambda x: x**2),
    "negated": ("-{}", lambda x: -x),
    "without its sign": ("abs({})", abs),
    **{f"plus {k}": (f"{{}} + {k}", lambda x, k=k: x + k) for k in range(1, 30)},  # type: ignore[misc]
    **{f"minus {k}": (f"{{}} - {k}", lambda x, k=k: x - k) for k in range(1, 30)},  # type: ignore[misc]
    **{f"times {k}": (f"{{}} * {k}", lambda x, k=k: x * k) for k in range(3, 10)},  # type: ignore[misc]
}
SHARES = {"test": 0.25, "gate": 0.2, "sentinel": 0.05}
"""Of all tasks; the others are for training."""
NUM_PUBLIC, NUM_HIDDEN = 1, 4


def generate(seed: int, split: str, count: int) -> list[Task]:
    """Returns `count` tasks of a split, the same for the same arguments. Raises ValueError if the split holds fewer."""
    pairs = [(one, two) for one, two in product(FIRST, THEN) if split_of(one, two) == split]
    if count > len(pairs):
        raise ValueError(f"small_functions: split {split!r} holds {len(pairs)} tasks, {count} were asked for")
    return [_task(one, two) for one, two in random.Random(f"{seed}/{split}").sample(pairs, count)]


def solution(prompt: str) -> str:
    """Returns a correct program for a task's prompt."""
    one, _, two = prompt.removeprefix("Write f(a, b): ").removesuffix(".").rpartition(", ")
    first, then = FIRST[one][0], THEN[two][0]
    inner = first if first.startswith(("max", "min")) else f"({first})"
    return f"def f(a, b): return {then.format(inner)}"


def split_of(one: str, two: str) -> str:
    """Returns the split of a task, which does not depend on seed or machine."""
    return part_of(f"{one}/{two}", SHARES, rest="train")


def _task(one: str, two: str) -> Task:
    rng = random.Random(f"{one}/{two}")
    calls = [[rng.randint(-20, 20), rng.randint(-20, 20)] for _ in range(NUM_PUBLIC + NUM_HIDDEN)]
    while len({*map(tuple, calls)}) < len(calls):
        calls = [[rng.randint(-20, 20), rng.randint(-20, 20)] for _ in calls]
    values = [THEN[two][1](FIRST[one][1](*call)) for call in calls]
    tests: dict[str, Any] = {
        "fn_name": "f",
        "public_tests": {"inputs": calls[:NUM_PUBLIC], "outputs": values[:NUM_PUBLIC]},
        "private_tests": {"inputs": calls[NUM_PUBLIC:], "outputs": values[NUM_PUBLIC:]},
    }
    prompt = f"Write f(a, b): {one}, {two}."
    name = sha256(prompt.encode()).hexdigest()[:16]
    return Task(
        task_id=name,
        prompt=prompt,
        answers=(),
        source="small_functions",
        metadata={"tests": tests, FAMILY: f"{one}/{two}"},
    )


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    right = solution(task.prompt).removeprefix("def f(a, b): return ")
    if agent == "planner":
        share_right = 0.6 if inputs["history"] else 0.35
        return _closed("pseudocode", right if rng.random() < share_right else _first_step(task), rng)
    if agent == "coder":
        plan = inputs["plan"] if rng.random() < 0.9 else _first_step(task)
        return _closed("code", f"def f(a, b): return {plan}", rng)
    advice = "do the second step" if rng.random() < 0.5 else "keep it"
    return _closed("reflection", advice, rng)


def _first_step(task: Task) -> str:
    first = task.prompt.removeprefix("Write f(a, b): ").rpartition(", ")[0]
    return FIRST[first][0]


def _closed(tag: str, text: str, rng: random.Random) -> str:
    """Now and then the last closing tag is missing."""
    return f"<{tag}>{text}" + (f"</{tag}>" if rng.random() > 0.08 else "")
