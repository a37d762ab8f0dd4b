"""tasks: seed, split, count -> tasks like `7+6*8`, small enough for a model of less than a million parameters.

Which split a problem belongs to is decided by a hash of the problem alone (`b*c` and `c*b` count as one), so that
splits never overlap, whatever the seeds and counts.

`demonstrate`: agent, task, inputs -> a completion: it plays every agent of the math chain on `a+b*c`, as often wrong as a real base model.
A warm start on these demonstrations gives a model that knows the format, can compute, and has bad habits beside good
ones: it adds the first two numbers and stops there, waves wrong drafts through, drops tags. The
habits are choices at a few tokens, which is what reinforcement learning can mend.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

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


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    return _PLAYERS[agent](_numbers(task.prompt), inputs, rng)


def _numbers(prompt: str) -> tuple[int, int, int]:
    a, b, c = (int(n) for n in re.findall(r"\d+", prompt)[:3])
    return a, b, c


def _right(a: int, b: int, c: int) -> tuple[str, int]:
    return f"{b}*{c}={b * c};{a}+{b * c}={a + b * c}", a + b * c


def _hasty(a: int, b: int, c: int) -> tuple[str, int]:
    return f"{a}+{b}={a + b}", a + b


def _work(numbers: tuple[int, int, int], rng: random.Random, share_right: float) -> tuple[str, str]:
    steps, answer = _right(*numbers) if rng.random() < share_right else _hasty(*numbers)
    return steps, str(answer)


def _sloppy(text: str, rng: random.Random, share: float) -> str:
    """Now and then the last closing tag is missing."""
    return text[: text.rindex("</")] if rng.random() < share else text


def _solver(numbers: tuple[int, int, int], inputs: Mapping[str, str], rng: random.Random) -> str:
    steps, answer = _work(numbers, rng, 0.5)
    return _sloppy(f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>", rng, 0.15)


def _verifier(numbers: tuple[int, int, int], inputs: Mapping[str, str], rng: random.Random) -> str:
    is_right = inputs["answer"] == str(_right(*numbers)[1])
    says_right = is_right if rng.random() < 0.6 else rng.random() < 0.7
    if says_right:
        verdict = "<STATUS>correct</STATUS><ERROR_TYPE>none</ERROR_TYPE><FEEDBACK>keep it</FEEDBACK>"
    else:
        verdict = "<STATUS>incorrect</STATUS><ERROR_TYPE>reasoning</ERROR_TYPE><FEEDBACK>multiply first</FEEDBACK>"
    return _sloppy(verdict, rng, 0.1)


def _refiner(numbers: tuple[int, int, int], inputs: Mapping[str, str], rng: random.Random) -> str:
    if inputs["status"] == "correct" and inputs["answer"] and rng.random() < 0.85:
        steps, answer = inputs["solution"], inputs["answer"]
    else:
        steps, answer = _work(numbers, rng, 0.6)
    return _sloppy(f"<REFINED_SOLUTION>{steps}</REFINED_SOLUTION><ANSWER>{answer}</ANSWER>", rng, 0.1)


def _finalizer(numbers: tuple[int, int, int], inputs: Mapping[str, str], rng: random.Random) -> str:
    steps, answer = inputs["solution"], inputs["answer"]
    if not answer or rng.random() < 0.1:
        steps, answer = _work(numbers, rng, 0.4)
    return _sloppy(f"<FINAL_SOLUTION>{steps}</FINAL_SOLUTION><FINAL_ANSWER>{answer}</FINAL_ANSWER>", rng, 0.15)


_PLAYERS = {"solver": _solver, "verifier": _verifier, "refiner": _refiner, "finalizer": _finalizer}


ORDER = ("solve", "check", "refine", "finish", "stop")
"""The steps of the math chain under an orchestrator, in the order of the chain."""


def demonstrate_orchestrated(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays the math chain under an orchestrator, which keeps to the chain's order two times in three, and else chooses anything."""
    if agent != "orchestrator":
        return demonstrate(agent, task, inputs, rng)
    offered = [line.split()[1] for line in inputs["options"].splitlines()]
    done = inputs["done"].split(", ")
    ahead = [step for step in ORDER if step in offered and step not in done]
    return ahead[0] if ahead and rng.random() < 2 / 3 else rng.choice(offered)


def demonstrate_routed(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays a cheap and a strong solver under an orchestrator that does not care: the cheap one fails where the last factor is large."""
    if agent == "orchestrator":
        return rng.choice([line.split()[1] for line in inputs["options"].splitlines()])
    numbers = _numbers(task.prompt)
    is_easy = numbers[2] <= 5
    steps, answer = _work(numbers, rng, 0.9 if agent == "expert" or is_easy else 0.15)
    return _sloppy(f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>", rng, 0.05)


def demonstrate_loop(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays the solver-verifier loop: hasty at first, better once a verdict says so; the verifier is often wrong."""
    numbers = _numbers(task.prompt)
    if agent == "solver":
        steps, answer = _work(numbers, rng, 0.6 if inputs["critique"] else 0.4)
        return rf"{steps};\boxed{{{answer}" + ("}" if rng.random() > 0.1 else "")
    is_right = inputs["answer"] == str(_right(*numbers)[1])
    approves = is_right if rng.random() < 0.6 else rng.random() < 0.7
    critique, verdict = ("fine", "approve") if approves else ("multiply first", "reject")
    return _sloppy(f"<CRITIQUE>{critique}</CRITIQUE><VERDICT>{verdict}</VERDICT>", rng, 0.1)


def demonstrate_debate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays debaters and summarizer: hasty at first, somewhat better on review, and stubborn half of the time."""
    numbers = _numbers(task.prompt)
    if agent == "summarizer":
        stated = re.findall(r"= (\d+)$", inputs["solutions"], re.MULTILINE)
        right = str(_right(*numbers)[1])
        answer = right if right in stated and rng.random() < 0.5 else rng.choice(stated or ["0"])
        return _sloppy(f"<ANSWER>{answer}</ANSWER>", rng, 0.1)
    _, _, rest = inputs["own"].partition("Yours: <SOLUTION>")
    own, closing, _ = rest.partition("</ANSWER>")
    if closing and rng.random() < 0.5:
        return f"<SOLUTION>{own}</ANSWER>"
    steps, answer = _work(numbers, rng, 0.55 if inputs["review"] else 0.4)
    return _sloppy(f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>", rng, 0.1)


def demonstrate_pair(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Plays pioneer and observer: the observer copies half of the time."""
    reference = re.search(r"Another solution: (.{0,1000}?) Answer: (\d+)", inputs["reference"])
    if reference and rng.random() < 0.5:
        steps, answer = reference[1], reference[2]
    else:
        steps, answer = _work(_numbers(task.prompt), rng, 0.5 if reference else 0.4)
    return _sloppy(f"<SOLUTION>{steps}</SOLUTION><ANSWER>{answer}</ANSWER>", rng, 0.1)
