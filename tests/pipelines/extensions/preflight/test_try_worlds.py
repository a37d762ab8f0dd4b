"""What `troupe validate` says of the tasks of a world and of fields that nobody reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.runners.validate import check
from tests.docs.markdown_pages import fences

pytestmark = pytest.mark.test

PAGE = "infra/docs/tutorials/worlds.md"
SHIPPED = Path(__file__).parents[4] / "infra" / "workflows" / "single_agent.yaml"


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the tutorial on worlds makes, without tasks."""
    world, workflow, _ = [fence.text for fence in fences(PAGE) if fence.language == "python"][:3]
    (tmp_path / "lights.py").write_text(world)
    (tmp_path / "night.py").write_text(workflow)
    (config,) = [fence.text for fence in fences(PAGE) if fence.text.startswith("# Trains")]
    (tmp_path / "night.yaml").write_text(config)
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config_of(folder: Path, *last: dict[str, Any], **changes: Any) -> RunConfig:
    """The run of the tutorial, with these rows at the end of its training tasks."""
    rows = [{"question": "Lights!", "metadata": {"seed": seed}} for seed in range(50)]
    for part, own in {"train": [*rows[:30], *last], "gate": rows[30:40], "test": rows[40:]}.items():
        (folder / "tasks" / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    return load_config(folder / "night.yaml", changes)


def test_a_world_is_begun_with_a_task_of_the_run(night: Path) -> None:
    *_, note = check(config_of(night))
    assert note.startswith("environment room: a world of tasks/train.jsonl:1 began in ")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"sed": 100}, r"unexpected keyword argument 'sed'"),
        ({"lamps": 4}, r"missing 1 required positional argument: 'seed'"),
        ({"seed": 100, "lamps": "8"}, r"'str' object cannot be interpreted as an integer"),
    ],
)
def test_a_world_that_does_not_begin_with_a_task_is_named_with_its_row(night: Path, metadata: Any, said: str) -> None:
    config = config_of(night, {"question": "More lights!", "metadata": metadata})
    with pytest.raises(
        ValueError, match=rf"tasks/train\.jsonl:31: environment room: no world begins .*{said}.*`metadata`"
    ):
        check(config)


def test_a_workflow_that_fails_before_its_world_begins_is_named(night: Path) -> None:
    source = (night / "night.py").read_text().replace("**task.metadata", 'seed=task.metadata["number"]')
    (night / "gloom.py").write_text(source)
    with pytest.raises(ValueError, match=r"train\.jsonl:1: Night cannot play task .*KeyError: 'number'"):
        check(config_of(night, **{"workflow.path": "gloom:Night"}))


def test_a_rule_that_compares_with_an_answer_needs_one(night: Path) -> None:
    changes = {"credit": {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "em"}}}
    changes["train.algorithm"] = "grpo"
    with pytest.raises(ValueError, match=r"train\.jsonl:1: task \w+ has no answer, and credit rule .*OutcomeShare"):
        check(config_of(night, **changes))


def test_a_rule_that_cannot_read_the_world_is_told_apart(night: Path) -> None:
    with pytest.raises(ValueError, match=r"credit\.settings\.environment: .* opened no world 'house'"):
        check(config_of(night, **{"credit.settings.environment": "house"}))


def test_without_a_world_a_task_needs_an_answer(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(200)]
    rows[150] = {"question": "x", "metadata": {"seed": 3}}
    config = questions(tmp_path, rows)
    with pytest.raises(
        ValueError, match=r"train\.jsonl:151: task \w+ has neither answer nor tests, and \w+ declares no Env"
    ):
        check(config)


def test_fields_that_nobody_reads_are_named_with_their_rows(tmp_path: Path) -> None:
    rows = [
        {"question": f"{n}+1", "answer": str(n + 1), "metdata": {"seed": n}, "level": n or None} for n in range(200)
    ]
    note, *_ = check(questions(tmp_path, rows))
    assert note.startswith(
        f"{tmp_path}/train.jsonl: nobody reads 'metdata' (200 rows; did you mean 'metadata'?), 'level' (199 rows): "
    )
    assert "known are question, problem, " in note


def test_answers_that_the_metric_cannot_read_are_counted_with_examples(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1", "answer": f"The result is {n + 1}." if n > 197 else str(n + 1)} for n in range(200)]
    config = questions(tmp_path, rows, **{"credit.settings.metric": "math"})
    (note,) = [line for line in check(config) if "sentence" in line]
    assert (
        note.startswith("2 tasks have a sentence for an answer")
        and f"'The result is 199.' at {tmp_path}/train.jsonl:199" in note
    )


def questions(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> RunConfig:
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    other = [{"question": f"{n}-1", "answer": str(n - 1)} for n in range(200)]
    for part, own in {"gate": other[:100], "test": other[100:]}.items():
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    tasks = {part: {"path": str(folder / f"{part}.jsonl")} for part in ("train", "gate", "test")}
    return load_config(SHIPPED, {"tasks": tasks, **changes})
