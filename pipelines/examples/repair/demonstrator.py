"""demonstrator: agent, task, inputs -> a completion: it plays locator, coder and verifier as somebody would who knows the code and is careless.

The locator names another file, the coder another line or another operator, the verifier does not read what the tests say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pipelines.examples.repair.tasks import SWAPS, Made, make_repository
from pipelines.examples.repair.workflow import AGAIN, SUBMIT
from stores.types import Task

SHARE_CARELESS = {"locator": 0.2, "coder": 0.3, "verifier": 0.3}


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    made, is_careless = make_repository(**task.metadata), rng.random() < SHARE_CARELESS[agent]
    if agent == "locator":
        return f"<FILE>{rng.choice(sorted(made.repaired)) if is_careless else made.path}</FILE>"
    if agent == "coder":
        number, text = _change(made, inputs["file"], rng, is_careless=is_careless)
        return f"<LINE>{number}</LINE><NEW>{text}</NEW>"
    verdict = SUBMIT if inputs["test_report"].endswith("passed") else AGAIN
    return f"<VERDICT>{rng.choice([SUBMIT, AGAIN]) if is_careless else verdict}</VERDICT>"


def _change(made: Made, shown: str, rng: random.Random, *, is_careless: bool) -> tuple[int, str]:
    """Returns the number and the new text of a line: the first that is not as it should be, else of one that does no harm."""
    lines = [line.partition(" ")[2] for line in shown.splitlines()]
    heads = [line for line in lines if line.startswith("def ")]
    right = next((text.splitlines() for text in made.repaired.values() if set(heads) <= set(text.splitlines())), lines)
    wrong = [number for number, (line, other) in enumerate(zip(lines, right, strict=False)) if line != other]
    number = wrong[0] if wrong else next((n for n, line in enumerate(lines) if line.startswith(" ")), 0)
    if not is_careless:
        return number + 1, right[number].strip()
    if rng.random() < 0.5:
        number = rng.randrange(len(lines))
    swaps = [(old, new) for old, new in SWAPS if old in right[number]]
    text = right[number].replace(*rng.choice(swaps), 1) if swaps else right[number]
    return number + 1, text.strip()
