"""padding_demonstrator: plays every agent of the math chain rightly, and now and then says what it has to say again and again.

A warm start on it shows a policy what padding is; whether it pays is for the credit rule to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from stores.types import Task

FORMS: Mapping[str, str] = {
    "solver": "<SOLUTION>{said}</SOLUTION><ANSWER>{answer}</ANSWER>",
    "verifier": "<STATUS>{status}</STATUS><ERROR_TYPE>{error}</ERROR_TYPE><FEEDBACK>{said}</FEEDBACK>",
    "refiner": "<REFINED_SOLUTION>{said}</REFINED_SOLUTION><ANSWER>{answer}</ANSWER>",
    "finalizer": "<FINAL_SOLUTION>{said}</FINAL_SOLUTION><FINAL_ANSWER>{answer}</FINAL_ANSWER>",
}
SHARE = 0.3
"""Of the completions that are padded."""
TIMES: Mapping[str, int] = {"solver": 3, "verifier": 8, "refiner": 3, "finalizer": 3}
"""A padded one says it so often; there is room for that in 64 tokens."""


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """The completion of `agent` for these inputs; the same `rng` state gives the same text."""
    a, b, c = (int(number) for number in re.findall(r"\d+", task.prompt)[:3])
    product, answer = b * c, a + b * c
    status, error, said = "correct", "none", f"{b}*{c}={product};{a}+{product}={answer}"
    if agent == "verifier" and inputs["answer"] == str(answer):
        said = "keep it"
    elif agent == "verifier":
        status, error, said = "incorrect", "reasoning", "multiply first"
    if rng.random() < SHARE:
        said = ";".join([said] * TIMES[agent])
    return FORMS[agent].format(said=said, answer=answer, status=status, error=error)
