"""demonstrator: agent, task, inputs -> a completion: it plays locator, coder and verifier as somebody would who knows the code and is careless.

The locator names another file, the coder another line or another operator, the verifier does not read what the tests say.
The function is always that of the issue.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.examples.repair.tasks import SWAPS, Made, make_repository
from pipelines.examples.repair.workflow import AGAIN, SUBMIT
from pipelines.tasks.splits import settings_of
from stores.types import Task

SHARE_CARELESS = {"locator": 0.2, "coder": 0.3, "verifier": 0.3}


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    made, is_careless = make_repository(**settings_of(task)), rng.random() < SHARE_CARELESS[agent]
    if agent == "locator":
        path = rng.choice(sorted(made.repaired)) if is_careless else made.path
        return f"<FILE>{path}</FILE><FUNCTION>{made.issue.partition('(')[0]}</FUNCTION>"
    if agent == "coder":
        number, text = _change(made, inputs["lines"], rng, is_careless=is_careless)
        return f"<LINE>{number}</LINE><NEW>{text}</NEW>"
    verdict = SUBMIT if inputs["test_report"].endswith("passed") else AGAIN
    return f"<VERDICT>{rng.choice([SUBMIT, AGAIN]) if is_careless else verdict}</VERDICT>"


def _change(made: Made, shown: str, rng: random.Random, *, is_careless: bool) -> tuple[int, str]:
    """Returns the number and the new text of a line: the first that is not as it should be, else of one that does no harm."""
    lines = [
        (int(number), text)
        for number, _, text in (line.partition(" ") for line in shown.splitlines())
        if number.isdecimal()
    ]
    if not lines:
        return 1, "pass"
    heads = {text for _, text in lines if text.startswith("def ")}
    right = next((text.splitlines() for text in made.repaired.values() if heads <= set(text.splitlines())), [])
    should_be = {number: right[number - 1] if number <= len(right) else text for number, text in lines}
    wrong = [number for number, text in lines if text != should_be[number]]
    indented = [number for number, text in lines if text.startswith(" ")]
    number = next(iter([*wrong, *indented, lines[0][0]]))
    if not is_careless:
        return number, should_be[number].strip()
    if rng.random() < 0.5:
        number = rng.choice(lines)[0]
    swaps = [(old, new) for old, new in SWAPS if old in should_be[number]]
    text = should_be[number].replace(*rng.choice(swaps), 1) if swaps else should_be[number]
    return number, text.strip()
