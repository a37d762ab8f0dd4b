"""Figures of an iteration from the results of its stages, in a real journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.figures.registry import FIGURES, METRICS
from pipelines.report.record import iteration_metrics
from pipelines.report.result import run_report
from pipelines.report.summaries import SoFar
from pipelines.report.summary import _span, figures_of_iteration
from pipelines.run.run import Run
from stores.journal.run_values import RunValue

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
TWO_GROUPS = {
    "a": {"agents": ["solver", "refiner"], "tiny_model": {"hidden_size": 64}},
    "b": {"agents": ["verifier", "finalizer"], "tiny_model": {"hidden_size": 64}},
}
GPUS = {"serve.gpus": 0.5, "train.gpus_per_worker": 0.5}


@pytest.mark.parametrize(("pool", "seconds"), [("shared", 3e-6), ("separate", 2e-6)])
def test_groups_that_train_on_the_same_gpus_train_one_after_another(tmp_path: Path, pool: str, seconds: float) -> None:
    changes: dict[str, Any] = {"storage.root": str(tmp_path), "model_groups": TWO_GROUPS, "pool": pool, **GPUS}
    run = Run(load_config(SMALL, changes))
    run.begin()
    results = (collected(sampling_seconds=0.0), scored(), synced(), evaluated(sampling_seconds=0.0), decided())
    for result in results:
        finish(run, 1, result)
    for group, learnt in (("a", 1e-6), ("b", 2e-6)):
        finish(run, 1, trained(group, metrics={"train/update_s": learnt}), group)
    figures = figures_of_iteration(run, 1)
    assert figures is not None and figures["metrics"]["training_seconds"] == pytest.approx(seconds)
    assert 1 - figures["metrics"]["overhead_share"] == pytest.approx(seconds / figures["seconds"]["total"], abs=1e-12)
    assert figures["metrics"].keys() <= {*FIGURES, *METRICS}, "names that no figure of one's own may have"


def test_what_was_not_measured_is_no_figure_of_an_iteration_and_null_in_the_report(tmp_path: Path) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    solver = {"format_share": 1.0, "calls": 4.0, "completion_tokens": 10.0}  # which the rule does not pay
    of_callers = scored(outcome=None, agents={"solver": solver}, cost={"multiplier": 0.5, "next_multiplier": 0.5})
    for result in (collected(num_new=0, num_tokens=0, sampling_seconds=0.0), of_callers, synced(), decided()):
        finish(run, 1, result)
    finish(run, 1, evaluated(candidate=None, verdict="skipped"))
    finish(run, 1, trained("team"), "team")
    figures = figures_of_iteration(run, 1)
    assert figures is not None and "reward" not in figures["agents"]["solver"]
    assert figures["metrics"].keys().isdisjoint({"outcome", "reward", "tokens_per_s", "cost"})
    metrics = iteration_metrics(figures | {"trained_agents": {}, "warnings": []})
    assert all(isinstance(value, float) for value in metrics.values()), "MLflow takes nothing else"
    so_far = SoFar()
    assert run_report(run, so_far, [])["sync_seconds"] is None
    so_far.add(figures | {"warnings": []})
    report = run_report(run, so_far, [figures])
    assert report["logprob_gap"] == {"mean": None, "max": None} and report["seconds"]["warmstart"] is None
    assert report["sync_seconds"] == 0.4


def test_between_two_sittings_of_a_run_nothing_was_trained(tmp_path: Path) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    finish(run, 1, trained("team"), "team")
    (row,) = run.journal.stages(run.run_id, 1)

    def at(begin: float, end: float) -> Any:
        return replace(row, started_at=begin, ended_at=end)

    night = 40_000.0
    assert _span([at(night, night + 5.0), at(0.0, 10.0)]) == 15.0
    assert _span([at(0.0, 10.0), at(2.0, 4.0), at(3.0, 12.0)]) == 12.0, "side by side"


def test_an_iteration_that_was_begun_here_and_ended_by_a_schedule_lasted_as_long_as_its_stages(tmp_path: Path) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.begin()
    for result in (collected(), scored(), synced(), evaluated(), decided()):
        finish(run, 1, result)
    finish(run, 1, trained("team"), "team")
    for name in (RunValue.WALL.of(1), RunValue.WALL):  # of `troupe train`, which was interrupted
        run.journal.put_value(run.run_id, name, {"seconds": 1e-9})
    figures = figures_of_iteration(run, 1)
    assert figures is not None
    *stages, total = figures["seconds"].values()
    assert total == pytest.approx(sum(stages)) and total > 1e-6
    so_far = SoFar()
    so_far.add(figures | {"warnings": []})
    assert run_report(run, so_far, [figures])["seconds"]["total"] == pytest.approx(total)
