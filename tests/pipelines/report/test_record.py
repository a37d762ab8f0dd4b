"""What a recorded iteration puts into MLflow. The tracker is a fake that notes its calls; the other stores are real."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from records import MakeTrace
from stage_records import call, collected, decided, evaluated, finish, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report import record as record_module
from pipelines.run.run import Run
from pipelines.stages.score import score
from stores.registry import experiment
from stores.types import EpisodeRewards, Purpose, Trace

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


@dataclass
class Logged:
    """The MLflow run that the fake tracker names."""

    mlflow_run_id: str = "m"


@dataclass
class FakeTracker:
    """Notes the names of the files that it is given, and the episodes that an extension shows."""

    files: list[str] = field(default_factory=list)
    episodes: list[tuple[str, int, float]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)

    def start(self, *, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self.params |= params

    def log_dict(self, name: str, content: Mapping[str, Any]) -> None:
        self.files.append(name)

    def log_iteration(self, iteration: int, **about: Any) -> Logged:
        return Logged()

    def log_metrics(self, metrics: Mapping[str, float], step: int, *, at: float) -> None:
        pass

    def log_file(self, path: str) -> None:
        self.files.append(Path(path).name)

    def finish(self, status: str) -> None:
        pass


def note(tracker: FakeTracker, mlflow_run: str, episodes: list[tuple[Trace, EpisodeRewards]]) -> None:
    """What an extension shows of an iteration."""
    tracker.episodes += [(mlflow_run, trace.iteration, rewards.outcome) for trace, rewards in episodes]


def play(run: Run, iteration: int, make_trace: MakeTrace) -> None:
    """Records the stages of an iteration of two episodes as done; they are scored."""
    where = {"run_id": run.run_id, "iteration": iteration, "purpose": Purpose.TRAIN, "team_key": "team"}
    traces = [make_trace(i, **where) for i in range(2)]
    run.traces.write_episodes(
        [replace(t, turns=tuple(replace(turn, model_group="team") for turn in t.turns)) for t in traces]
    )
    finish(run, iteration, collected(traces=run.traces.pin_episodes(**where), policy_versions={"team": iteration}))
    finish(run, iteration, score(call(run, "score", iteration)))
    finish(run, iteration, trained("team", iteration), "team")
    stages: list[Any] = [synced(), evaluated(), decided()]
    for stage in stages:
        finish(run, iteration, stage)


def test_the_page_goes_into_mlflow_with_the_first_iterations_then_every_so_often_and_at_the_end(
    make_trace: MakeTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "UPLOAD_EVERY", 2)
    monkeypatch.setattr(record_module, "hooks", lambda kind: {"noted": note} if kind == "episodes" else {})
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "iterations": 5}))
    run.begin()
    tracker = run.__dict__["tracker"] = FakeTracker()
    with_page = []
    for iteration in range(1, 6):
        play(run, iteration, make_trace)
        tracker.files.clear()
        page = Path(record_module.record(run, iteration)["report"])
        assert page.is_file() and "report.json" in tracker.files, "both are written each time"
        with_page += [iteration] if "report.html" in tracker.files else []
    assert with_page == [1, 2, 4]
    assert tracker.episodes == [("m", iteration, 1.0) for iteration in range(1, 6) for _ in range(2)]
    assert {"run.yaml"} <= set(tracker.files)
    assert (
        tracker.params["train.optimizer.lr"] == run.config.train.optimizer.lr
        and tracker.params["seed"] == run.config.seed
    )
    assert not any(name.startswith("storage") for name in tracker.params), (
        "where a run is stored tells no two runs apart"
    )
    tracker.files.clear()
    record_module.finish_parent(run)
    assert {"report.html", "report.json"} <= set(tracker.files)


def test_two_processes_that_begin_a_run_at_once_show_it_as_one(
    tmp_path: Path, mlflow_place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each made an MLflow run of its own, and what one of them logged was on a page that nobody found again."""
    tracking, artifacts = mlflow_place
    where = {"storage.root": str(tmp_path), "storage.mlflow": tracking, "storage.artifacts": artifacts}
    runs = [Run(load_config(SMALL, {**where, "run": "at-once"})) for _ in range(3)]
    looked, find = threading.Barrier(2), experiment.find_run

    def find_both(*place: Any) -> str | None:
        found = find(*place)
        if found is None:
            with suppress(threading.BrokenBarrierError):
                looked.wait(3)
        return found

    monkeypatch.setattr(experiment, "find_run", find_both)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(record_module.open_parent, runs[:2]))
    assert len({run.tracker.mlflow_run_id for run in runs}) == 1
