"""Rows of tables as they are: JSON text in cells, missing values, conversations, and numbers that were read as floats."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.sources import load_tasks
from pipelines.tasks.task_fields import read_task, unread_fields
from serve_apps.tools.text_match import exact_match
from stores.types import Task

pytestmark = pytest.mark.fast

NAN, INF = float("nan"), float("inf")


def task_of(**row: Any) -> Task:
    return read_task(row, "f:1", "s")


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"reward_model": {"ground_truth": '{"target": ["Ann", "Bob"]}'}}, ("Ann", "Bob")),
        ({"reward_model": '{"ground_truth": "{\\"target\\": \\"Ann\\"}"}'}, ("Ann",)),
        ({"reward_model": {"ground_truth": '["72"]'}}, ("72",)),
        ({"answer": '{"target": ["Ann", "Bob"]}'}, ("Ann", "Bob")),
        ({"answer": ' ["Ann", "Bob"] '}, ("Ann", "Bob")),
        ({"answer": ['{"answer": "Ann"}', "Bob"]}, ("Ann", "Bob")),
        ({"golden_answers": '["1945", 1946.0, null]'}, ("1945", "1946")),
        ({"env_kwargs": '{"ground_truth": ["Ann"]}'}, ("Ann",)),
        ({"extra_info": '{"answer": "3+4=7\\n#### 7"}'}, ("7",)),
        ({"answer": {"target": {"ground_truth": "Ann"}}}, ("Ann",)),
        ({"answer": '[{"target": "Ann"}]'}, ("Ann",)),
        ({"answer": [{"target": "Ann"}]}, ("Ann",)),
        ({"answer": '[["Ann"], {"answer": ["Bob", null]}]'}, ("Ann", "Bob")),
        ({"answer": "[null, 3]"}, ("3",)),
    ],
)
def test_answers_that_are_json_text_are_read(row: dict[str, Any], answers: tuple[str, ...]) -> None:
    assert task_of(question="Who?", **row).answers == answers


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[1, 2)",
        "{1, 2}",
        '{"name": "Ann"}',
        "[x]",
        "{",
        "[[1, 0], [0, 1]]",
        "[]",
        '[{"name": "Ann"}]',
        "[true]",
    ],
)
def test_an_answer_that_only_looks_like_data_stays_a_text(text: str) -> None:
    assert task_of(question="q", answer=text).answers == (text,)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": NAN}, r"^f:1: task without answer: .*answer \(missing\)"),
        ({"answer": None}, r"^f:1: task without answer: .*answer \(missing\)"),
        ({"reward_model": {"ground_truth": NAN}}, "^f:1: task without answer"),
        ({"answer": ["4", NAN]}, r"^f:1: answer\[2\] is nan"),
        ({"answer": '["4", NaN]'}, r"^f:1: answer\[2\] is nan"),
        ({"golden_answers": [[NAN]]}, r"^f:1: golden_answers\[1\]\[1\] is nan"),
        (
            {"reward_model": {"ground_truth": {"numbers": [6, 4], "target": 24}}},
            r"^f:1: reward_model\.ground_truth has 'numbers' beside its target: .* credit rule of your own",
        ),
        ({"answer": INF}, "^f:1: answer is inf"),
        ({"answer": "[NaN]"}, r"^f:1: answer\[1\] is nan"),
        ({"answer": "[[1, -Infinity]]"}, r"^f:1: answer\[1\]\[2\] is -inf"),
        ({"answer": '{"target": null}'}, "^f:1: task without answer"),
        ({"answer": {"target": None}}, "^f:1: task without answer"),
        ({"answer": "[null]"}, "^f:1: task without answer"),
        ({"answer": -INF}, "^f:1: answer is -inf"),
        ({"answer": ["4", INF]}, r"^f:1: answer\[2\] is inf"),
        ({"reward_model": {"ground_truth": {"target": [INF]}}}, r"^f:1: reward_model.ground_truth\[1\] is inf"),
        ({"reward_model": '{"ground_truth": 1e999}'}, "^f:1: reward_model.ground_truth is inf"),
        ({"answer": Decimal("Infinity")}, "^f:1: answer is Infinity"),
    ],
)
def test_a_missing_or_infinite_answer_is_refused_with_its_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(question="2+2", **row)


def test_nan_is_missing_in_every_field() -> None:
    """A table that was joined has NaN in each column that the other table lacks."""
    row = {"answer": NAN, "solution": "\\boxed{4}", "id": NAN, "source": NAN, "tests": NAN, "starter_code": NAN}
    task = task_of(question="2+2", query=NAN, extra_info={"level": NAN, "costs": [1.0, NAN, INF]}, **row)
    assert (task.prompt, task.answers, task.source) == ("2+2", ("4",), "s")
    assert task.task_id == task_of(question="2+2", answer="4").task_id
    assert task.metadata == {"level": None, "costs": [1.0, None, None]}
    json.dumps(dict(task.metadata), allow_nan=False)


BASE_8 = [{"role": "system", "content": "Numbers are in base 8."}, {"role": "user", "content": "7+1?"}]
PARTS = [
    {"role": "developer", "content": "Numbers are in base 8."},
    {"role": "user", "content": [{"type": "text", "text": "7+"}, {"type": "text", "text": "1?"}]},
]


@pytest.mark.parametrize("prompt", [BASE_8, json.dumps(BASE_8), PARTS, json.dumps(PARTS)])
def test_all_messages_of_a_prompt_are_kept(prompt: Any) -> None:
    assert task_of(prompt=prompt, answer="10").prompt == "Numbers are in base 8.\n\n7+1?"


@pytest.mark.parametrize("prompt", [BASE_8, json.dumps(BASE_8), PARTS])
def test_a_system_message_beside_a_question_is_kept(prompt: Any) -> None:
    assert task_of(question="7+1?", prompt=prompt, answer="10").prompt == "Numbers are in base 8.\n\n7+1?"
    with pytest.raises(ValueError, match=r"^f:1: two prompts: question is '2\+2\?', and prompt has a system message"):
        task_of(question="2+2?", prompt=prompt, answer="10")


@pytest.mark.parametrize("prompt", ["Say: 7+1?", BASE_8[1:], [{"role": "system", "content": ""}, *BASE_8[1:]]])
def test_a_question_comes_before_a_prompt_without_a_system_message(prompt: Any) -> None:
    assert task_of(question="7 + 1?", prompt=prompt, answer="8").prompt == "7 + 1?"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([{"content": "7+1?"}], "7+1?"),
        ({"role": "user", "content": "7+1?"}, "7+1?"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "a\n\nb"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": "### Question:\n7+1?\n### Answer:"}], "7+1?"),
        ("[1, 2] has which sum?", "[1, 2] has which sum?"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_a_prompt_is_what_system_and_user_say(prompt: Any, text: str) -> None:
    assert task_of(prompt=prompt, answer="10").prompt == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [*BASE_8, {"role": "assistant", "content": "10"}, BASE_8[1]],
            r"f:1: prompt\[3\]: a message of role 'assistant'",
        ),
        (json.dumps([*BASE_8, {"role": "tool", "content": "10"}]), r"f:1: prompt\[3\]: a message of role 'tool'"),
        ([*BASE_8, "and then?"], r"f:1: prompt\[3\]: a message of role 'str'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"prompt\[1\]: content of kind 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"prompt\[1\]: content of kind 'text'"),
        ([{"role": "user", "content": None}], r"f:1: prompt\[1\]: content of kind 'NoneType'"),
    ],
)
def test_a_conversation_that_is_more_than_a_question_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(prompt=prompt, answer="10")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.0, "72"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e-3, "0.001"),
        (1e-7, "0.0000001"),
        (123456789012.0, "123456789012"),
        (1e300, "1e+300"),
        (Decimal("72.00"), "72"),
        (Decimal("0.10"), "0.1"),
        (72, "72"),
        (True, "True"),
    ],
)
def test_a_number_is_written_as_people_write_it(value: Any, text: str) -> None:
    assert task_of(question="q", answer=value).answers == task_of(question="q", answer=[value]).answers == (text,)


def test_a_whole_number_that_a_table_made_a_float_pays_for_itself_only(tmp_path: Path) -> None:
    """One missing value makes the whole column of a table one of floats."""
    path = tmp_path / "t.parquet"
    table = pyarrow.table({"question": ["a", "b"], "answer": pyarrow.array([72.0, 720.0]), "id": [1.0, 2.0]})
    pyarrow.parquet.write_table(table, path)
    tasks = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert [(task.task_id, task.answers) for task in tasks] == [("1", ("72",)), ("2", ("720",))]
    assert (exact_match("72", tasks[0].answers), exact_match("720", tasks[0].answers)) == (1.0, 0.0)


def test_numbers_of_32_bits_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    single = pyarrow.float32()
    truth = pyarrow.struct([("ground_truth", pyarrow.list_(single)), ("style", pyarrow.string())])
    columns = {
        "question": ["a", "b", "c"],
        "answer": pyarrow.array([0.1, 72.0, None], single),
        "reward_model": pyarrow.array([None, None, {"ground_truth": [0.3, 1e-3], "style": "rule"}], truth),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    tasks = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert [task.answers for task in tasks] == [("0.1",), ("72",), ("0.3", "0.001")]


@pytest.mark.parametrize(
    ("type_", "values", "answers"),
    [
        (pyarrow.large_list(pyarrow.float32()), [0.1, 72.0, None], ("0.1", "72")),
        (pyarrow.list_(pyarrow.float32(), 2), [0.1, 0.3], ("0.1", "0.3")),
        (pyarrow.large_list(pyarrow.list_(pyarrow.float32(), 1)), [[0.1], [0.3]], ("0.1", "0.3")),
        (pyarrow.map_(pyarrow.string(), pyarrow.float32()), [("target", 0.1)], ("0.1",)),
    ],
)
def test_numbers_of_32_bits_read_as_they_were_written_in_lists_of_each_sort_and_maps(
    tmp_path: Path, type_: pyarrow.DataType, values: Any, answers: tuple[str, ...]
) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "answer": pyarrow.array([values], type_)}), path)
    (task,) = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert task.answers == answers


def test_a_map_of_a_table_is_an_object(tmp_path: Path) -> None:
    """Spark and DuckDB write objects of names and values as maps."""
    path = tmp_path / "t.parquet"
    texts, numbers = (pyarrow.map_(pyarrow.string(), kind) for kind in (pyarrow.string(), pyarrow.int64()))
    table = {
        "question": ["Which?"],
        "options": pyarrow.array([[("A", "x"), ("B", "y")]], texts),
        "reward_model": pyarrow.array([[("style", "rule"), ("ground_truth", "B")]], texts),
        "metadata": pyarrow.array([[("seed", 7)]], numbers),
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    (task,) = load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)
    assert (task.prompt, task.answers, task.metadata) == ("Which?\nA. x\nB. y", ("B", "B. y", "y"), {"seed": 7})


@pytest.mark.parametrize("kind", ["column", "map", "object"])
def test_a_name_that_stands_twice_in_a_table_is_refused_as_in_json(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.parquet"
    twice: dict[str, Any] = {
        "map": pyarrow.array([[("seed", 1), ("seed", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "object": pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["seed", "seed"]),
    }
    more = [pyarrow.array(["4"]), pyarrow.array(["5"])] if kind == "column" else [pyarrow.array(["4"]), twice[kind]]
    names = ["question", "answer", "answer" if kind == "column" else "metadata"]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["2+2"]), *more], names=names), path)
    with pytest.raises(ValueError, match=rf"^{path}: .*(twice|[Dd]uplicate)"):
        load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)


@pytest.mark.parametrize("depth", [900, 5000])
def test_lists_without_end_are_refused_with_their_row(depth: int) -> None:
    nested: Any = "7"
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(ValueError, match=r"^f:1: objects or lists within one another"):
        task_of(question="q", answer=nested)


def test_an_answer_beside_an_integer_of_any_length_is_found() -> None:
    assert task_of(prompt="p", extra_info=f'{{"seed": {"1" * 5000}, "answer": "7"}}').answers == ("7",)
    assert task_of(prompt="p", reward_model=f'{{"ground_truth": [{"1" * 5000}, "7"]}}').answers == ("1" * 5000, "7")


LAMPS = {"question": "Switch off every lamp."}


def test_the_metadata_of_a_row_is_that_of_its_task() -> None:
    task = task_of(**LAMPS, metadata={"seed": 0, "lamps": 6, "size": None, "sizes": [1, None]})
    assert task.metadata == {"seed": 0, "lamps": 6, "sizes": [1, None]}, "null is a missing value"
    assert task.answers == (), "a world says itself whether its task is done"
    assert task_of(**LAMPS, metadata='{"seed": 0}').metadata == {"seed": 0}


def test_metadata_wins_over_extra_info() -> None:
    task = task_of(**LAMPS, metadata={"seed": 1}, extra_info={"seed": 2, "level": None})
    assert task.metadata == {"seed": 1, "level": None}


def test_tasks_that_differ_in_their_metadata_alone_have_ids_of_their_own() -> None:
    rows = [{"seed": 0}, {"seed": 1}, {"seed": 1, "lamps": 6}, {"heaps": [1, 2]}, {"heaps": [2, 1]}]
    assert len({task_of(**LAMPS, metadata=metadata).task_id for metadata in rows}) == len(rows)
    one, other = {"seed": 1, "lamps": 6}, {"lamps": 6, "seed": 1}
    assert task_of(**LAMPS, metadata=one).task_id == task_of(**LAMPS, metadata=other).task_id


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"metadata": None},
        {"metadata": {}},
        {"metadata": "train"},
        {"metadata": {"index": 7, "split": "train", "seed": None}},
        {"metadata": {"answer": "4", "family": "2+2"}},
        {"extra_info": {"seed": 7}},
        {"family": "2+2"},
    ],
)
def test_what_tells_no_tasks_apart_leaves_the_id_that_rows_always_had(beside: dict[str, Any]) -> None:
    assert task_of(question="2+2", answer="4", **beside).task_id == "fc7f53dc7bc0999f"


def test_the_name_of_a_function_in_the_metadata_of_tests_leaves_their_id() -> None:
    code = {"question": "Add.", "tests": [{"input": "1", "output": "2"}]}
    named = task_of(**code, metadata={"func_name": "f"})
    assert named.task_id == task_of(**code).task_id


@pytest.mark.parametrize(
    ("row", "family"),
    [
        ({"family": "2+2"}, "2+2"),
        ({"family": 7.0}, "7"),
        ({"metadata": {"family": "2+2"}}, "2+2"),
        ({"metadata": {"family": "2+2"}, "family": "other"}, "2+2"),
        ({"metadata": {"family": None}, "family": "2+2"}, "2+2"),
    ],
)
def test_a_family_is_read_from_its_column_and_from_the_metadata(row: dict[str, Any], family: str) -> None:
    assert task_of(question="2+2", answer="4", **row).metadata == {"family": family}


def test_a_family_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^f:1: family = \['a'\] is no name: write a text or a number"):
        task_of(question="2+2", answer="4", family=["a"])


@pytest.mark.parametrize(
    "row", [{"answer": "half \ud83d"}, {"id": "1", "answer": ["4", "half \ud83d"]}, {"id": "half \ud83d"}]
)
def test_half_of_a_surrogate_pair_is_refused_with_its_row(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^f:1: half of a surrogate pair ends '.*half \\ud83d'"):
        task_of(**{"question": "2+2", "answer": "4", **row})


def test_a_task_without_answer_needs_settings() -> None:
    with pytest.raises(ValueError, match=r"^f:1: task without answer: .* stand in `metadata`$"):
        task_of(**LAMPS, metadata={"split": "train", "family": "lamps"})


def test_fields_that_no_task_is_made_of_are_named() -> None:
    row = {
        "question": "q",
        "answer": "1",
        "index": 3,
        "A": "x",
        "B": "y",
        "level": 2,
        "meta": {"seed": 1},
        "hint": None,
    }
    assert unread_fields(row) == ["level", "meta"]
    assert unread_fields({"question": "q", "metadata": "no object", "label": 3}) == ["metadata", "label"]
    assert unread_fields({"question": "q", "options": ["x", "y"], "label": "A"}) == []
    assert unread_fields({"question": "q", "label": [{"input": "1", "output": "2"}]}) == []
