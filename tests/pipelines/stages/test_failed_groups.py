"""A model group whose training fails for good: the iteration is held, or goes on with its parent version and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_records import call, collected, evaluated, finish, scored, synced

from pipelines.config.run_config import load_config
from pipelines.report.record import _notes
from pipelines.report.summaries import SoFar
from pipelines.run.run import Run
from pipelines.stages import evaluate, train
from pipelines.stages.promote import promote
from pipelines.stages.steps import run_stage
from stores.journal.stage_results import TrainAnswer
from stores.types import ModelVersionRef
from train_loops.train_job import TrainJob
from train_loops.worker.trainer_handle import TrainJobError

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUPS = {"a": {"agents": ["solver"]}, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
DIVERGED = TrainJobError("TrainingDivergedError", "three steps in a row had a loss that is not finite\nmore of it")


class Trainer:
    """Commits a version, or raises what it is told."""

    def __init__(self, group: str, fault: Exception | None) -> None:
        self.group, self.fault = group, fault

    def run_job(self, job: TrainJob, *, timeout_s: float) -> TrainAnswer:
        if self.fault is not None:
            raise self.fault
        return TrainAnswer(model=ref(self.group, 1), reason="", metrics={}, agents={})

    def stop(self) -> None:
        """Called where a trainer hangs; this one has no process."""


def ref(group: str, version: int) -> ModelVersionRef:
    return ModelVersionRef(model_group=group, version=version, uri=f"{group}/{version}", manifest_sha256="")


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Exception | None], **changes: Any) -> Run:
    """Iteration 1 of a run, as far as its train stages come; what they raise is raised."""
    run = Run(load_config(SMALL, {"storage.root": str(folder), "model_groups": GROUPS, **changes}))
    run.__dict__["weights"] = SimpleNamespace(ref=ref, uri_of=lambda group, version: str(folder / group))
    monkeypatch.setattr(train, "trainer_of", lambda run, group: Trainer(group, faults[group]))
    for result in (collected(policy_versions={"a": 0, "b": 0}), scored()):
        finish(run, 1, result)
    for group in GROUPS:
        run_stage(run, "train", 1, model_group=group)
    return run


def test_a_failed_group_holds_the_iteration_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainJobError, match="TrainingDivergedError"):
        trained(tmp_path, monkeypatch, {"a": None, "b": DIVERGED})
    held = Run(load_config(SMALL, {"storage.root": str(tmp_path), "model_groups": GROUPS}))
    (row,) = [row for row in held.journal.stages(held.run_id, 1) if (row.stage, row.model_group) == ("train", "b")]
    assert row.status == "failed" and "not finite" in row.error, "the next attempt trains it again"


def test_the_rest_goes_on_with_the_parent_of_the_failed_group_and_the_decision_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, monkeypatch, {"a": None, "b": DIVERGED}, **{"promote.on_failed_group": "keep_parent"})
    assert run.trained(1) == {"a": ref("a", 1), "b": ref("b", 0)}
    why = "training failed: TrainingDivergedError: three steps in a row had a loss that is not finite"
    assert run.iteration(1).failed_groups == {"b": why}
    finish(run, 1, synced())
    better = evaluated(promotes=("a",))
    monkeypatch.setattr(evaluate, "_compare", lambda call: better)
    report = evaluate.evaluate(call(run, "evaluate", 1))
    assert (report.verdict, report.promotes) == ("promote", ("a",))
    assert report.condition == f"gain +0.2; model group b: {why}" and report.failed_groups == {"b": why}
    row: dict[str, Any] = {
        "iteration": 1,
        "failed_groups": run.iteration(1).failed_groups,
        "versions": {"a": 1, "b": 0},
    }
    so_far = SoFar()
    so_far.add(row | {"groups": {}, "seconds": {}, "metrics": {"sync_seconds": 0.0}, "warnings": [], "source": ""})
    assert f"Iteration 1: model group b kept version 0, {why}" in _notes(run, so_far)


def test_where_every_group_failed_there_is_nothing_to_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, monkeypatch, {"a": DIVERGED, "b": DIVERGED}, **{"promote.on_failed_group": "keep_parent"})
    finish(run, 1, synced())
    report = evaluate.evaluate(call(run, "evaluate", 1))
    finish(run, 1, report)
    assert report.verdict == "skipped" and report.condition.count("training failed") == 2
    assert promote(call(run, "promote", 1)).team_version is None


@pytest.mark.parametrize("fault", [TrainJobError("RayActorError", "worker died"), TimeoutError("not done after 60 s")])
def test_what_may_succeed_when_repeated_is_no_failed_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    with pytest.raises((TrainJobError, TimeoutError)):
        trained(tmp_path, monkeypatch, {"a": fault, "b": None}, **{"promote.on_failed_group": "keep_parent"})


def test_the_rest_needs_another_group_and_a_stage_of_its_own() -> None:
    with pytest.raises(
        ValueError, match=r"on_failed_group: keep_parent promotes the other model groups .* there is only one"
    ):
        load_config(SMALL, {"promote.on_failed_group": "keep_parent"})
    changes = {"model_groups": GROUPS, "promote.on_failed_group": "keep_parent"}
    with pytest.raises(ValueError, match=r"on_failed_group: keep_parent, but with train\.algorithm: mappo"):
        load_config(SMALL, {**changes, "train.algorithm": "mappo"})
    assert load_config(SMALL, {"promote.on_failed_group": "fail", "promote.deploy": "direct"}).sha256 == (
        load_config(SMALL).sha256
    ), "runs that began before these keys existed go on"


def test_groups_of_two_runs_never_share_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(train, "trainer_threads", lambda run, group: 1)
    monkeypatch.setattr(train, "attach", lambda name, **settings: names.append(name))
    for run_id, group in (("r", "a-b"), ("r-a", "b")):
        groups = {group: {"agents": ["solver", "verifier", "refiner", "finalizer"]}}
        changes = {"run": run_id, "storage.root": str(tmp_path), "model_groups": groups}
        train.trainer_of(Run(load_config(SMALL, changes)), group)
    assert len(set(names)) == 2, "a trainer of the same name with another folder is ended first"
