"""Rows in the published shapes of the papers' data sets: the task that a workflow gets, its id, and what is there again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.sections import TaskSourceConfig
from pipelines.tasks.sources import load_tasks
from stores.types import Task

pytestmark = pytest.mark.fast

INSTRUCTIONS = "You are a helpful assistant. Reason step by step and put the answer into \\boxed{}."


def tasks_of(tmp_path: Path, rows: Any, name: str = "t.jsonl") -> list[Task]:
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)) if name.endswith(".jsonl") else json.dumps(rows))
    return load_tasks(TaskSourceConfig(path=str(path)), section="train", seed=0)


def search_r1(source: str, number: int, question: str) -> dict[str, Any]:
    """A row of the merge of nq and hotpotqa."""
    return {
        "id": f"train_{number}",
        "question": question,
        "golden_answers": ["Paris"],
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Answer the given question. Question: {question}?"}],
        "reward_model": {"ground_truth": {"target": ["Paris"]}, "style": "rule"},
        "extra_info": {"index": number, "split": "train"},
    }


def test_sources_that_number_their_rows_alike_make_one_set(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, [search_r1("nq", 0, "capital of France"), search_r1("hotpotqa", 0, "city of light")])
    assert [(t.task_id, t.source, t.prompt) for t in tasks] == [
        ("nq/train_0", "nq", "capital of France"),
        ("hotpotqa/train_0", "hotpotqa", "city of light"),
    ]


@pytest.mark.parametrize("field", ["task_id", "uid", "query_id", "problem_id", "unique_id"])
def test_a_row_is_called_by_what_names_it(tmp_path: Path, field: str) -> None:
    (task,) = tasks_of(tmp_path, [{field: 7, "question": "6 + 1", "answer": "7"}])
    assert task.task_id == "7"


def test_the_number_in_verls_extra_info_is_an_id_within_its_source(tmp_path: Path) -> None:
    row = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "6 + 1"}], "extra_info": {"index": 0}}
    (task,) = tasks_of(tmp_path, [row | {"reward_model": {"ground_truth": "7"}}])
    assert task.task_id == "gsm8k/0"


def test_a_question_of_dr_mas_comes_without_the_system_message_of_all_rows(tmp_path: Path) -> None:
    row = {
        "data_source": "math",
        "prompt": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "6 + 1"}],
        "env_kwargs": {"question": "6 + 1", "ground_truth": "7", "data_source": "math"},
    }
    (task,) = tasks_of(tmp_path, [row])
    assert (task.prompt, task.answers) == ("6 + 1", ("7",))


def test_a_task_may_still_stand_in_a_system_message_alone(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "6 + 1"}]
    (task,) = tasks_of(tmp_path, [{"question": "6 + 1", "prompt": said, "answer": "sept"}])
    assert "Answer in French." in task.prompt


def test_rows_that_are_there_again_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in (1, 2, 1, 1)]
    with caplog.at_level(logging.WARNING):
        tasks = tasks_of(tmp_path, rows)
    assert [task.prompt for task in tasks] == ["1 + 1", "2 + 1"]
    assert "tasks.train: repeated rows that were left out: 2; tasks: 2" in caplog.text


def test_one_id_of_two_tasks_is_refused(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": "1 + 1", "answer": "2"}, {"id": "a", "question": "1 + 2", "answer": "3"}]
    with pytest.raises(ValueError, match=r":2: task id 'a' was used before, at .*:1"):
        tasks_of(tmp_path, rows)


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"question": "6 + 1", "answer": "7"}], "version": "1.0"},
        {"version": ["1", "0"], "data": [{"question": "6 + 1", "answer": "7"}], "other": [1]},
    ],
)
def test_rows_may_stand_in_the_list_data_of_an_object(tmp_path: Path, content: dict[str, Any]) -> None:
    (task,) = tasks_of(tmp_path, content, "t.json")
    assert (task.prompt, task.answers) == ("6 + 1", ("7",))


@pytest.mark.parametrize(
    ("solution", "answers"),
    [("7", ("7",)), (r"\frac{1}{2}", (r"\frac{1}{2}",)), (r"Add them: $\boxed{7}$", ("7",))],
)
def test_a_short_solution_is_the_answer(tmp_path: Path, solution: str, answers: tuple[str, ...]) -> None:
    (task,) = tasks_of(tmp_path, [{"problem": "6 + 1", "solution": solution}])
    assert task.answers == answers
