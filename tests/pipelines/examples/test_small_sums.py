"""The tasks and the workflow of `make demo-real`, without a model."""

from __future__ import annotations

import re

import pytest

from pipelines.examples.small_sums.tasks import SIZES, WORDINGS, generate
from pipelines.examples.small_sums.workflow import Equation

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


@pytest.mark.parametrize("split", SIZES)
def test_answers_solve_what_is_asked(split: str) -> None:
    for task in generate(seed=1, split=split, count=30):
        assert task.answers == (str(eval(expression(task.prompt))),)


def test_seeds_change_the_order_and_a_split_has_an_end() -> None:
    first = generate(seed=1, split="gate", count=40)
    assert first == generate(seed=1, split="gate", count=40) != generate(seed=2, split="gate", count=40)
    with pytest.raises(ValueError, match="holds 40 tasks, 41 were asked for"):
        generate(seed=1, split="gate", count=41)
    with pytest.raises(ValueError, match="'dev' does not exist: use one of test, gate, train"):
        generate(seed=1, split="dev", count=1)


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
