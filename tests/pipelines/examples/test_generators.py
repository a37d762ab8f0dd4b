"""Seeded worlds: the same everywhere, splits apart, answers true."""

from __future__ import annotations

import importlib

import pytest

from pipelines.examples.made_up_facts import tasks as made_up_facts
from pipelines.examples.small_functions import tasks as small_functions
from pipelines.extensions.code_tasks.code_tests import read_tests
from pipelines.extensions.code_tasks.code_verifier import CodeVerifier
from serve_apps.extensions.sandbox import Sandbox
from serve_apps.extensions.sandbox.config import SandboxConfig
from serve_apps.tools.text_match import exact_match, f1, normalize

pytestmark = pytest.mark.fast

SPLITS = ("train", "gate", "test", "sentinel")


def test_questions_are_answered_by_the_documents() -> None:
    shown = {d["title"]: d["text"] for d in made_up_facts.documents()}
    assert len(shown) == 2000 + 120 + 12
    for task in made_up_facts.generate(seed=0, split="test", count=100):
        (answer,) = task.answers
        name = next(title for title in shown if f" {title} " in f"{task.prompt[:-1]} ")
        hops = shown[name] + shown[shown[name].split("lives in ")[1].split()[0]]
        assert answer in (hops if task.source == "two_hop" else shown[name])


def test_people_are_in_one_split_and_seeds_decide() -> None:
    one, again, other = (made_up_facts.generate(seed=s, split="train", count=50) for s in (1, 1, 2))
    assert one == again != other
    prompts = [{t.prompt for t in made_up_facts.generate(seed=0, split=s, count=100)} for s in SPLITS]
    assert len(set.union(*prompts)) == 400
    with pytest.raises(ValueError, match="split 'sentinel' holds"):
        made_up_facts.generate(seed=0, split="sentinel", count=10_000)


def test_functions_have_tests_that_their_solutions_pass_and_splits_that_are_apart() -> None:
    tasks = {split: small_functions.generate(seed=3, split=split, count=12) for split in SPLITS}
    assert len({t.prompt for part in tasks.values() for t in part}) == 48
    judge = CodeVerifier(sandbox=Sandbox(SandboxConfig(wall="none")))
    for task in tasks["test"]:
        tests = read_tests(task.metadata["tests"], place="t")
        assert (len(tests.public), len(tests.cases), tests.fn_name) == (1, 4, "f")
        assert judge.judge(small_functions.solution(task.prompt), tests).verdict == "pass", task.prompt


@pytest.mark.parametrize("name", ["arithmetic", "small_sums", "nim", "household", "repair"])
def test_a_split_that_does_not_exist_is_named_with_those_that_do(name: str) -> None:
    generate = importlib.import_module(f"pipelines.examples.{name}.tasks").generate
    with pytest.raises(ValueError, match=r"'dev' does not exist: use one of .*train"):
        generate(seed=0, split="dev", count=1)


@pytest.mark.parametrize(
    ("answer", "references", "em", "score"),
    [
        ("The Red Town!", ["red town"], 1.0, 1.0),
        ("red", ["red town"], 0.0, 2 / 3),
        ("red red town", ["red town"], 0.0, 0.8),
        ("", [""], 0.0, 0.0),
        ("", ["A"], 0.0, 0.0),
        ("A", ["A"], 1.0, 1.0),
        ("?", ["+"], 0.0, 0.0),
        ("", ["red"], 0.0, 0.0),
        ("the", ["a"], 0.0, 0.0),
        ("blue", ["red", "blue sky"], 0.0, 2 / 3),
        ("blue", [], 0.0, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(answer: str, references: list[str], em: float, score: float) -> None:
    assert exact_match(answer, references) == em
    assert f1(answer, references) == pytest.approx(score)
    assert normalize("A  cat, an owl; the end.") == "cat owl end"
