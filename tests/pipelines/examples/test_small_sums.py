"""The tasks and the workflow of `make demo-real`, without a model."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest

from pipelines.examples.small_sums.tasks import CHAINED_SIZES, SIZES, WORDINGS, generate, generate_chained
from pipelines.examples.small_sums.workflow import Equation, TwoSteps

pytestmark = pytest.mark.fast
ALL = SIZES | {"train": SIZES["train"] * len(WORDINGS)}


def expression(prompt: str) -> str:
    found = re.search(r"\d+ [-+*] \d+", prompt)
    assert found
    return found[0]


def test_no_expression_is_in_two_splits_whatever_the_seed() -> None:
    of = {
        split: {expression(t.prompt) for seed in (0, 7) for t in generate(seed=seed, split=split, count=count)}
        for split, count in ALL.items()
    }
    assert {split: len(found) for split, found in of.items()} == SIZES
    assert len(set.union(*of.values())) == sum(SIZES.values())
    assert_apart({split: {ordered(x) for x in found} for split, found in of.items()})


def ordered(expression: str) -> str:
    """The expression, with the smaller number first where their order changes nothing."""
    a, sign, b = expression.split()
    return expression if sign == "-" or int(a) <= int(b) else f"{b} {sign} {a}"


def assert_apart(of: dict[str, set[str]]) -> None:
    assert len(set.union(*of.values())) == sum(map(len, of.values())) > 240


@pytest.mark.parametrize("split", SIZES)
def test_answers_solve_what_is_asked(split: str) -> None:
    for task in generate(seed=1, split=split, count=30):
        assert task.answers == (str(eval(expression(task.prompt))),)


def test_seeds_change_the_order_and_a_split_has_an_end() -> None:
    first = generate(seed=1, split="gate", count=40)
    assert first == generate(seed=1, split="gate", count=40) != generate(seed=2, split="gate", count=40)
    with pytest.raises(ValueError, match="holds 40 tasks, 41 were asked for"):
        generate(seed=1, split="gate", count=41)


@pytest.mark.parametrize(
    ("text", "answer", "is_ok"),
    [
        ("7 * 8 = 56", "56", True),
        ("18 - 20 = -2.", "-2", True),
        (" 2+3 =5\n", "5", True),
        ("The sum of 7 and 8 is 15.", "15", False),
        ("7 * 8 = 56\n7 * 9 = 63", "63", False),
        ("7 * 8 = 50 + 6 = 56", "56", False),
        ("7 * 8 = 56 apples", "56", False),
        ("1,200 + 1 = 1,201", "1201", False),
        ("no idea", "", False),
        ("", "", False),
    ],
)
def test_an_equation_is_one_line_and_the_last_number_is_read_in_any_case(text: str, answer: str, is_ok: bool) -> None:
    parsed = Equation().parse(text)
    assert (parsed.fields["answer"], not parsed.fault) == (answer, is_ok)


def test_tasks_of_two_steps_are_in_one_split_and_their_steps_lead_to_the_answer() -> None:
    tasks_of = {split: generate_chained(seed=3, split=split, count=count) for split, count in CHAINED_SIZES.items()}
    tasks = [task for part in tasks_of.values() for task in part]
    assert len({task.prompt for task in tasks}) == len(tasks) == sum(CHAINED_SIZES.values())
    for task in tasks:
        product = eval(task.metadata["first"])
        assert task.answers == (str(eval(f"{product} {task.metadata['then']}")),)
        assert task.prompt == f"What is {task.metadata['first']} {task.metadata['then']}?" and int(task.answers[0]) > 0
    forms = {
        split: [(ordered(t.metadata["first"]), t.metadata["then"]) for t in part] for split, part in tasks_of.items()
    }
    assert_apart({split: {f"{first} {then}" for first, then in part} for split, part in forms.items()})
    with pytest.raises(ValueError, match="split 'gate' with 41 tasks was asked for"):
        generate_chained(seed=0, split="gate", count=41)


def test_the_second_agent_goes_on_with_what_the_first_found() -> None:
    asked = []

    async def second(**values: str) -> dict[str, str]:
        asked.append(TwoSteps.second.prompt.format(**values))
        return Equation().parse("55 + 5 = 60").fields

    async def first(**values: str) -> dict[str, str]:
        asked.append(TwoSteps.first.prompt.format(**values))
        return Equation().parse("7 * 8 = 55").fields

    tasks = [t for split, count in CHAINED_SIZES.items() for t in generate_chained(seed=0, split=split, count=count)]
    (task,) = [t for t in tasks if t.prompt == "What is 7 * 8 + 5?"]
    outcome = asyncio.run(TwoSteps().run(task, SimpleNamespace(first=first, second=second), None))
    assert [text.splitlines()[1] for text in asked] == ["What is 7 * 8?", "What is 55 + 5?"]
    assert outcome.answer == "60"
