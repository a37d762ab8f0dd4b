"""An iteration in one process: what it hands on, in which order, and what is left where a stage fails. Stages are only recorded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners import schedule
from pipelines.stages.table import Step

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
RECORDS = {"collect": collected, "score": scored, "sync": synced, "evaluate": evaluated, "promote": decided}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def record_iteration(run: Run, iteration: int, **_: Any) -> dict[str, Any]:
        return {"report": f"report of {iteration}"}

    monkeypatch.setattr(schedule, "record_iteration", record_iteration)
    return Run(load_config(SMALL, {"storage.root": str(tmp_path), "model_groups": GROUPS}))


def do_step(run: Run, step: Step, *, failing: str = "") -> None:
    for group in GROUPS if step.stage == "train" else ("",):
        if group and group == failing:
            raise RuntimeError(f"{group} diverged")
        finish(run, step.iteration, trained(group) if group else RECORDS[step.stage](), group)


def test_each_stage_hands_on_its_result_in_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "do_step", do_step)
    parts = dict(schedule.iterate(run, 1, address="", screen=Screen()))
    assert list(parts) == ["collect", "score", "train/a", "train/b", "sync", "evaluate", "promote", "record"]
    assert parts["train/b"]["model"]["model_group"] == "b" and parts["score"]["outcome"] == 0.5
    assert parts["record"] == {"report": "report of 1"}


def test_a_model_group_that_is_trained_hands_on_its_result_though_another_one_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "do_step", partial(do_step, failing="b"))
    parts = []
    with pytest.raises(RuntimeError, match="b diverged"):
        for part, _ in schedule.iterate(run, 1, address="", screen=Screen()):
            parts.append(part)
    assert parts == ["collect", "score", "train/a"]
