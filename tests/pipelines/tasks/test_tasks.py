"""Task sources: the field names of the field, and one clear message for every bad file."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.config.sections import DottedConfig, TaskSourceConfig
from pipelines.tasks.sources import check_disjoint, load_tasks
from pipelines.tasks.splits import are_one_task
from stores.types import Task

pytestmark = pytest.mark.fast


def load(path: Path, count: int | None = None) -> list[Task]:
    return load_tasks(TaskSourceConfig(path=str(path), count=count), section="train", seed=0)


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "math.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"question": "1+1?", "answer": 2}, "1+1?", ("2",)),
        ({"problem": "p", "solution": "so \\boxed{\\frac{1}{2}}."}, "p", ("\\frac{1}{2}",)),
        ({"problem": "p", "solution": "so \\boxed{3} and \\boxed{5}."}, "p", ("3, 5",)),
        ({"query": "q", "target": ["a", "b", "a"]}, "q", ("a", "b")),
        ({"prompt": "p", "ground_truth": "g", "solution": "\\boxed{s}"}, "p", ("g",)),
        ({"prompt": "p", "reward_model": {"style": "rule", "ground_truth": "7"}, "answer": "8"}, "p", ("7",)),
        ({"question": "gsm", "answer": "2 + 2 = 4\n#### 4"}, "gsm", ("4",)),
        ({"question": "zero", "answer": 0}, "zero", ("0",)),
        ({"question": "q", "reward_model": "Paris"}, "q", ("Paris",)),
        ({"question": "q", "reward_model": ["Paris", "paris"]}, "q", ("Paris", "paris")),
        ({"question": "q", "reward_model": '{"ground_truth": "Paris"}'}, "q", ("Paris",)),
        ({"question": "q", "answer": "[1, 2]"}, "q", ("[1, 2]",)),
        ({"prompt": "Be good.\n### Question:\nAdd.\n\n### Answer: (in backticks)\n", "answer": "1"}, "Add.", ("1",)),
        ({"prompt": "### Question: Add.\n### Format: stdin", "answer": "1"}, "Add.\n### Format: stdin", ("1",)),
    ],
)
def test_the_field_names_of_math_data_are_read(
    tmp_path: Path, row: dict[str, Any], prompt: str, answers: tuple[str, ...]
) -> None:
    (task,) = load(written(tmp_path, row))
    assert (task.prompt, task.answers, task.source) == (prompt, answers, "math")


def test_verl_parquet_with_messages_and_extra_info_is_read(tmp_path: Path) -> None:
    row = {
        "data_source": "DigitalLearningGmbH/MATH",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}],
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 3, "split": "train"},
    }
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (task,) = load(path)
    assert (task.prompt, task.answers) == ("Be brief.\n\nWhat is 2+3?", ("5",))
    assert task.source == "DigitalLearningGmbH/MATH"
    assert task.metadata == {"index": 3, "split": "train"}


def test_ids_are_stable_and_given_ids_win(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "1", "id": 0}]
    first = load(written(tmp_path, *rows))
    assert first == load(written(tmp_path, *rows))
    assert first[1].task_id == "0"
    json_path = tmp_path / "math.json"
    json_path.write_text(json.dumps(rows))
    assert load(json_path) == first
    assert load(json_path, count=1) == first[:1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", "", "holds no task"),
        ("t.json", "[]", "holds no task"),
        ("t.jsonl", '{"question": "a", "answer": "1"}\n{oops\n', r"t\.jsonl:2: not JSON .*oops"),
        (
            "t.jsonl",
            '{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1", "answer": "2"}\n',
            r"t\.jsonl:2: the key 'answer' stands twice",
        ),
        ("t.jsonl", '{"question": "a", "extra_info": {"b": 1, "b": 1}}\n', r"t\.jsonl:1: the key 'b' stands twice"),
        (
            "t.json",
            '[{"question": "a", "answer": "1"}, {"question": "b", "x": {"answer": 3}, "answer": "1", "answer": "2"}]',
            r"t\.json: item 2: the key 'answer' stands twice",
        ),
        ("t.jsonl", "[1]\n", r"t\.jsonl:1: a task is a JSON object, this is list"),
        ("t.json", '{"a": 1}\n{"a": 1}', r"t\.json: not JSON .*\.jsonl"),
        (
            "t.jsonl",
            '\n{"question": "a", "answr": "1"}\n',
            r"t\.jsonl:2: task without answer: .*target, solution.*answr",
        ),
        (
            "t.jsonl",
            '{"question": "a", "solution": "First add them.\\nThen it is seven."}\n',
            r"t\.jsonl:1: task without answer",
        ),
        ("t.jsonl", '{"text": "a", "answer": "1"}\n', r"t\.jsonl:1: no task prompt: .*question.*has text, answer"),
        (
            "t.jsonl",
            '{"id": 1, "query": "a", "answer": 1}\n{"id": 1, "query": "b", "answer": 1}',
            r":2: .*'1'.*jsonl:1",
        ),
        (
            "t.jsonl",
            '{"question": "a", "answer": 1001}\n{"question": "b", "answer": 1}\n{"question": "a", "answer": 999}\n',
            r"t\.jsonl:3: 'a' has the answer '999', and at .*t\.jsonl:1 it has another: write both into one row",
        ),
        ("t.jsonl", '{"question": "a", "answer": 1}\n' + "[" * 100_000, r"t\.jsonl:2: not JSON .*recursion"),
        ("t.jsonl", '{"question": "a", "answer": ' + "1" * 5000 + "}", r"t\.jsonl:1: not JSON .*4300 digits"),
        (
            "t.json",
            '[{"question": "a", "answer": 1}, ' + "[" * 100_000,
            r"t\.json: not JSON after item 1 \(more than 200 brackets",
        ),
        (
            "t.json",
            '[{"question": "a", "answer": ' + "1" * 5000 + "}]",
            r"t\.json: not JSON after item 0 .*integer overflow",
        ),
        ("t.json", '{"question": "a"}', r"t\.json: holds no list"),
        ("t.parquet", "no", "not Parquet"),
        ("t.csv", "no", "unknown suffix: use one of"),
    ],
)
def test_a_bad_file_is_one_clear_message(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(
    "more",
    [
        {"answer": "The U.S.A."},
        {"answer": ["USA", "America"]},
        {"answer": "2", "metadata": {"seed": 2}},
        {"answer": "2", "choices": ["usa", "UK", "2"]},
    ],
)
def test_a_question_may_stand_twice_where_the_answer_or_the_task_is_the_same(tmp_path: Path, more: Any) -> None:
    assert len(load(written(tmp_path, {"question": "a", "answer": "USA"}, {"question": "a", **more}))) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks\.train: task file .*absent\.jsonl does not exist"):
        load(tmp_path / "absent.jsonl")


def test_bytes_that_are_no_text_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:2: not UTF-8"):
        load(path)


def generator(settings: dict[str, Any], split: str = "") -> TaskSourceConfig:
    dotted = DottedConfig(path="pipelines.examples.arithmetic.tasks:generate", settings=settings)
    return TaskSourceConfig(generator=dotted, count=20, split=split)


def test_a_generator_gets_the_section_as_its_split_unless_one_is_given() -> None:
    test = load_tasks(generator({}), section="test", seed=1)
    assert test == load_tasks(generator({}, split="test"), section="gate", seed=1)
    check_disjoint({"test": test, "gate": load_tasks(generator({}), section="gate", seed=1)})
    with pytest.raises(ValueError, match=r"tasks\.gate and tasks\.test share the task '"):
        check_disjoint({"test": test, "gate": test[:1]})


def house(**settings: Any) -> Task:
    return Task(task_id=str(settings), prompt="Put a potato on the table.", answers=(), metadata=settings)


@pytest.mark.parametrize(
    ("train", "gate"),
    [({"seed": 1}, {"seed": 2}), ({"world": {"seed": 1}}, {"world": {"seed": 2}}), ({"a": 1, "b": 1}, {"b": 2})],
)
def test_two_worlds_with_one_prompt_are_two_tasks(train: dict[str, Any], gate: dict[str, Any]) -> None:
    check_disjoint({"train": [house(**train)], "gate": [house(**gate)]})
    assert not are_one_task(house(**train), house(**gate))


@pytest.mark.parametrize(
    ("train", "gate"),
    [
        ({}, {"seed": 1}),
        ({"seed": 1}, {"seed": 1}),
        ({"seed": 1, "index": 3, "split": "train"}, {"seed": 1, "index": 0, "split": "test"}),
        ({"answer": "7", "row_id": 1}, {"answer": "8", "row_id": 2}),
        ({"level": 5}, {"subject": "algebra"}),
        ({"seed": 1}, {"seed": 1.0}),
        ({"world": {"seed": 1, "at": [2]}}, {"world": {"at": [2.0], "seed": 1}}),
    ],
)
def test_what_only_says_where_a_row_was_found_makes_no_other_task(train: dict[str, Any], gate: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tasks\.gate and tasks\.train share the task 'Put a potato .*`metadata`"):
        check_disjoint({"train": [house(**train)], "gate": [house(**gate)]})
    assert are_one_task(house(**train), house(**gate))


def test_a_task_with_fewer_settings_does_not_make_one_task_of_two_others() -> None:
    check_disjoint({"train": [house(seed=1), house(level=3)], "gate": [house(seed=2, level=4)]})


WORLDS = st.fixed_dictionaries(
    {"seed": st.sampled_from([1, 1.0, [1], [1.0], "1"])}, optional={"level": st.integers(3, 4)}
)


@settings(max_examples=100)
@given(train=st.lists(WORLDS, min_size=1, max_size=3), gate=st.lists(WORLDS, min_size=1, max_size=3))
def test_two_sets_are_refused_if_and_only_if_a_pair_of_theirs_is_one_task(
    train: list[dict[str, Any]], gate: list[dict[str, Any]]
) -> None:
    ours, theirs = [house(**world) for world in train], [house(**world) for world in gate]
    try:
        check_disjoint({"train": ours, "gate": theirs})
        is_refused = False
    except ValueError:
        is_refused = True
    assert is_refused == any(are_one_task(one, other) for one in ours for other in theirs)


def test_sets_of_worlds_with_one_prompt_are_compared_in_linear_time() -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="share the task"):
        check_disjoint(
            {
                "train": [house(seed=i) for i in range(4_000)],
                "gate": [house(seed=-1 - i) for i in range(1_000)] + [house(seed=9)],
            }
        )
    assert time.process_time() - started < 5


def endless(*, seed: int, split: str, count: int, given: Any = None) -> Any:
    """Takes no notice of `count`, as generators of users do."""
    if given is not None:
        return given if given != "nothing" else None
    return (Task(task_id=f"{split}-{i}", prompt=f"{i}+{seed}", answers=(str(i + seed),)) for i in itertools.count())


def of_own(**settings: Any) -> TaskSourceConfig:
    return TaskSourceConfig(generator=DottedConfig(path="test_tasks:endless", settings=settings), count=3)


def test_no_more_tasks_are_taken_from_a_generator_than_the_config_says_and_fewer_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = load_tasks(of_own(), section="train", seed=1)
    assert [task.prompt for task in tasks] == ["0+1", "1+1", "2+1"] and caplog.text == ""
    load_tasks(of_own(given=tasks[:2]), section="train", seed=1)
    assert "tasks.train: the generator has 2 tasks, count = 3" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", r"^tasks\.train\.generator: test_tasks:endless gives None: let it return a list of tasks"),
        ([{"question": "1+1"}], r"^tasks\.train: task 1 is \{'question': '1\+1'\}, and must be a stores\.types\.Task"),
    ],
)
def test_a_generator_that_gives_no_tasks_is_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tasks(of_own(given=given), section="train", seed=1)


def test_tests_of_a_table_that_json_does_not_have_are_named_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q"], "tests": [[{"input": b"1", "output": b"1"}]]}), path)
    with pytest.raises(
        ValueError, match=r"t\.parquet: row 1: task '.*': Object of type bytes is not JSON serializable: write"
    ):
        load(path)


def test_a_generator_that_refuses_its_settings_says_which() -> None:
    with pytest.raises(ValueError, match=r"tasks\.train\.generator\.settings: .*max_b"):
        load_tasks(generator({"max_b": 3}), section="train", seed=0)
