"""tasks: seed, split, count -> repositories with one fault that breaks one test; no repository of one split is in another.

`demonstrate`: agent, task, inputs -> a completion: it plays locator, coder and verifier as somebody would who knows the code and is careless.
The locator names another file, the coder another line or another operator, the verifier does not read what the tests say.
The function is always that of the issue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

from pipelines.examples.repair.library import LIBRARY, Function
from pipelines.examples.repair.workflow import AGAIN, SUBMIT
from pipelines.tasks.repository_rows import REPAIRED
from pipelines.tasks.splits import part_of, settings_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.5, "gate": 0.2, "test": 0.25, "sentinel": 0.05}
"""Approximate share of all repositories in each split."""
NUM_FILES, NUM_FUNCTIONS, NUM_CASES = 3, 3, 3
MAX_SEED = 10**9
SWAPS = (
    (" + ", " - "), (" - ", " + "), (" * ", " + "), (" // ", " * "), (" < ", " > "), (" > ", " < "), (" or ", " and "), ("max(", "min("),
    ("min(", "max("), ("upper", "lower"), ("[0]", "[1]"), ("[1]", "[0]"), ("[1:]", "[2:]"), (" 2", " 3"), (" 1", " 2"), (" 5", " 4"), ("* 3", "* 2"),
)  # fmt: skip
"""Text of a line and what a fault puts in its place."""


@dataclass(frozen=True, slots=True)
class Made:
    """A repository with a fault, and what only its maker knows."""

    files: Mapping[str, str]
    """With the tests that agents may see."""
    hidden: Mapping[str, str]
    repaired: Mapping[str, str]
    """The files without the fault."""
    path: str
    """The file with the fault."""
    fault: str
    """The function as it stands there."""
    issue: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def generate(*, seed: int, split: str, count: int) -> list[Task]:
    """Returns `count` tasks of `split`. Raises ValueError for an unknown split."""
    if split not in SHARES:
        raise ValueError(f"repair: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    dice = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        number = dice.randrange(MAX_SEED)
        made = make_repository(number)
        if split_of(made) == split:
            tasks.setdefault(repr(made.files), _task(number, made))
    return list(tasks.values())


def split_of(made: Made) -> str:
    """Returns the split of a repository, which depends on its fault only: agents that know the fault need no other file."""
    return part_of(_family(made), SHARES, rest="train")


def _family(made: Made) -> str:
    """Returns what a repository has in common with others of the same fault."""
    return f"{made.path}/{made.fault}"


@lru_cache(maxsize=4096)
def make_repository(seed: int) -> Made:
    """Returns the repository with this number."""
    dice = random.Random(seed)
    chosen = {
        path: dice.sample(LIBRARY[path], NUM_FUNCTIONS) for path in sorted(dice.sample(sorted(LIBRARY), NUM_FILES))
    }
    path = dice.choice(sorted(chosen))
    function, mutant = dice.choice([(function, mutant) for function in chosen[path] for mutant in mutants(function)])
    telling = dice.choice([call for call in function.calls if value_of(function, call) != value_of(mutant, call)])
    cases = {f.name: dice.sample(f.calls, NUM_CASES) for functions in chosen.values() for f in functions}
    cases[function.name] = [telling, *(call for call in cases[function.name] if call != telling)][:NUM_CASES]
    repaired = {file: _source(functions) for file, functions in chosen.items()}
    sources = repaired | {path: _source([mutant if f is function else f for f in chosen[path]])}
    names = [(file, f.name) for file, functions in chosen.items() for f in functions]
    hidden = {_hidden(file): _tests(file, functions, cases) for file, functions in chosen.items()}
    visible = {
        f"test_{file}": _tests(file, functions, {name: calls[:1] for name, calls in cases.items()})
        for file, functions in chosen.items()
    }
    call = ", ".join(map(repr, telling))
    return Made(
        files=sources | visible,
        hidden=hidden,
        repaired=repaired,
        path=path,
        fault=mutant.source,
        issue=f"{function.name}({call}) gives {value_of(mutant, telling)!r}, not {value_of(function, telling)!r}",
        fail_to_pass=(f"{_hidden(path)}::test_{function.name}",),
        pass_to_pass=tuple(f"{_hidden(file)}::test_{name}" for file, name in names if name != function.name),
    )


def mutants(function: Function) -> Iterator[Function]:
    """Yields the function with one fault, where that raises nothing and changes what it gives."""
    for number, line in enumerate(function.body):
        for old, new in SWAPS:
            if old in line:
                body = (*function.body[:number], line.replace(old, new, 1), *function.body[number + 1 :])
                mutant = replace(function, body=body)
                with suppress(TypeError, IndexError, ZeroDivisionError):
                    values = [value_of(mutant, call) for call in function.calls]
                    if values != [value_of(function, call) for call in function.calls]:
                        yield mutant


def value_of(function: Function, call: tuple[Any, ...]) -> Any:
    """Returns what a function gives."""
    return _compiled(function.name, function.source)(*call)


@cache
def _compiled(name: str, source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    made: Callable[..., Any] = scope[name]
    return made


def _source(functions: list[Function]) -> str:
    return "\n".join(function.source for function in functions) + "\n"


def _tests(path: str, functions: list[Function], cases: Mapping[str, list[tuple[Any, ...]]]) -> str:
    names = ", ".join(function.name for function in functions)
    tests = [f"from {path.removesuffix('.py')} import {names}"]
    for function in functions:
        checks = [
            f"    assert {function.name}({', '.join(map(repr, call))}) == {value_of(function, call)!r}"
            for call in cases[function.name]
        ]
        tests.append("\n".join([f"def test_{function.name}():", *checks]))
    return "\n\n\n".join(tests) + "\n"


def _hidden(path: str) -> str:
    return f"test_hidden_{path}"


def _task(number: int, made: Made) -> Task:
    return Task(
        task_id=f"repair-{number}",
        prompt=made.issue,
        answers=(REPAIRED,),
        source=made.path.removesuffix(".py"),
        metadata={
            "seed": number,
            FAMILY: sha256(_family(made).encode()).hexdigest()[:16],
        },  # agents may not see the fault
    )


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
