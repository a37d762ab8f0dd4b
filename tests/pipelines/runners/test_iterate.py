"""An iteration in one process: what it hands on, in which order, and what is left where a stage fails. Stages are only recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners import iterate as iterating

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
RECORDS = {"collect": collected, "score": scored, "sync": synced, "evaluate": evaluated, "promote": decided}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_stage(run: Run, name: str, iteration: int) -> Any:
        record = RECORDS[name]()
        finish(run, iteration, record)
        return record

    def record_iteration(run: Run, iteration: int, **_: Any) -> dict[str, Any]:
        return {"report": f"report of {iteration}"}

    monkeypatch.setattr(iterating, "run_stage", run_stage)
    monkeypatch.setattr(iterating, "record_iteration", record_iteration)
    return Run(load_config(SMALL, {"storage.root": str(tmp_path), "model_groups": GROUPS}))


def test_each_stage_hands_on_its_result_in_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_all(run: Run, iteration: int) -> None:
        for group in GROUPS:
            finish(run, iteration, trained(group), group)

    monkeypatch.setattr(iterating, "train_all", train_all)
    parts = dict(iterating.iterate(run, 1, address="", screen=Screen()))
    assert list(parts) == ["collect", "score", "train/a", "train/b", "sync", "evaluate", "promote", "record"]
    assert parts["train/b"]["model"]["model_group"] == "b" and parts["score"]["outcome"] == 0.5
    assert parts["record"] == {"report": "report of 1"}


def test_a_model_group_that_is_trained_hands_on_its_result_though_another_one_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_all(run: Run, iteration: int) -> None:
        finish(run, iteration, trained("a"), "a")
        raise RuntimeError("b diverged")

    monkeypatch.setattr(iterating, "train_all", train_all)
    parts = []
    with pytest.raises(RuntimeError, match="b diverged"):
        for part, _ in iterating.iterate(run, 1, address="", screen=Screen()):
            parts.append(part)
    assert parts == ["collect", "score", "train/a"]
