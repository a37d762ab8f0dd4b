"""Timelines of a stored run: from its journal and its traces, read once and kept; what is not stored is not made up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import MakeTrace
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.extensions.timeline import timeline
from pipelines.extensions.timeline.timeline import NUM_KEPT, latest_timelines, read_timeline
from pipelines.report.record import write_reports
from pipelines.report.summary import figures_of_iteration
from pipelines.run.run import Run
from stores.journal.run_values import RunValue
from stores.journal.schema import STAGES
from stores.journal.stage_results import TracesSource
from stores.types import Purpose

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"
TEAM = "team"
BEGAN = 1_795_775_000.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    opened = Run(load_config(SMALL, {"storage.root": str(tmp_path), "iterations": 40}))
    opened.open()
    return opened


def play(
    run: Run, k: int, make_trace: MakeTrace | None, *, parts: Mapping[str, tuple[float, float]] | None = None
) -> None:
    """Iteration k lasts 100 s from BEGAN + 1000 k on: collect 40, a pause of 2, score 1, train 50, sync 7, no time for the rest.

    Of its two episodes the second has its only turn from 12.5 to 20 s after collect began.
    """
    began = BEGAN + 1000 * k
    where = {"run_id": run.run_id, "iteration": k, "purpose": Purpose.TRAIN, "team_key": "team"}
    if make_trace is not None:
        trace = make_trace(0, **where)
        turn = replace(trace.turns[0], model_group=TEAM, start_s=0.5, duration_s=7.5)
        call = replace(trace.tool_calls[0], tool="search", start_s=8.0, duration_s=2.0)
        early = replace(trace, started_at=began - 500, duration_s=400, turns=(turn,), tool_calls=(call,))
        late = replace(early, episode_id=f"{early.episode_id[:-1]}x", started_at=began + 12, duration_s=11)
        run.traces.write_episodes([early, late])
    finish(run, k, collected(policy_versions={TEAM: k - 1}))
    finish(run, k, scored())
    finish(run, k, trained(TEAM, k, parts=parts), TEAM)
    for result in (synced(), evaluated(), decided()):
        finish(run, k, result)
    times = {"collect": (0, 40), "score": (42, 43), "train": (43, 93), "sync": (93, 100)}
    for stage in ("collect", "score", "train", "sync", "evaluate", "promote"):
        begin, end = times.get(stage, (100, 100))
        change(run, k, stage, started_at=began + begin, ended_at=began + end)


def change(run: Run, k: int, stage: str, **values: Any) -> None:
    """Changes the journal's row of a stage."""
    with run.journal._connect() as connection:
        is_row = (STAGES.c.run_id == run.run_id) & (STAGES.c.iteration == k) & (STAGES.c.stage == stage)
        connection.execute(STAGES.update().where(is_row).values(values))


def spans(run: Run, k: int) -> dict[str, list[tuple[float, float, str]]]:
    """By lane, its spans in seconds since the iteration began."""
    found = read_timeline(run, k)
    assert found is not None
    return {
        lane: [(round(s.start_s - found.start_s, 3), round(s.end_s - found.start_s, 3), s.what) for s in each]
        for lane, each in found.lanes.items()
    }


def test_lanes_are_read_from_the_journal_the_results_and_the_traces(run: Run, make_trace: MakeTrace) -> None:
    began = BEGAN + 1043
    play(run, 1, make_trace, parts={"read": (began + 1, began + 4), "learn": (began + 4, began + 49)})
    assert spans(run, 1) == {
        "engine team": [(12.5, 20.0, "calls")],
        "trainer team": [(44.0, 47.0, "read"), (47.0, 92.0, "learn")],
        "collectors": [(12.0, 23.0, "calls")],
        "tool search": [(20.0, 22.0, "calls")],
    }, "the episode of an earlier attempt is left out"
    found = read_timeline(run, 1)
    assert found is not None
    waits = {(wait.who, wait.waited_for): round(wait.seconds, 3) for wait in found.waits}
    assert waits["engines", "the trainer of model group team was at work"] == 48
    assert waits["engines and trainers", "the next stage had not begun"] == 2
    assert waits["engines and trainers", "tool search was at work (collect)"] == 2
    assert found.seconds == 100 and read_timeline(run, 2) is None


def test_without_traces_only_stages_and_trainers_are_known(run: Run) -> None:
    play(run, 1, None)
    assert spans(run, 1) == {"trainer team": [(43.0, 93.0, "train")]}


@pytest.mark.parametrize(
    "changes",
    [{"num_new": 0}, {"source": TracesSource(run="other", iteration=2, store="/runs")}],
    ids=["none", "taken over"],
)
def test_an_iteration_that_sampled_nothing_had_idle_engines(run: Run, changes: dict[str, Any]) -> None:
    finish(run, 1, collected(**changes))
    assert spans(run, 1) == {"engine team": [], "collectors": []}


def test_calls_of_a_stage_that_is_still_running_are_unknown(run: Run, make_trace: MakeTrace) -> None:
    play(run, 1, make_trace)
    change(run, 1, "collect", status="running", ended_at=None, expires_at=time.time() + 60)
    found = read_timeline(run, 1)
    assert found is not None and not found.at_once and found.stages[0].label == "collect (running)"
    assert found.stages[0].end_s == pytest.approx(time.time(), abs=5)
    change(run, 1, "collect", expires_at=time.time() - 60)
    found = read_timeline(run, 1)
    assert found is not None and found.is_settled and found.stages[0].label == "collect (stopped)"


def test_the_traces_of_an_iteration_are_read_once(
    run: Run, make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    compute = timeline.read_timeline

    def counted(run: Run, iteration: int) -> Any:
        read.append(iteration)
        return compute(run, iteration)

    monkeypatch.setattr(timeline, "read_timeline", counted)
    for k in (1, 2):
        play(run, k, make_trace)
        found = latest_timelines(run, k)
    assert read == [1, 2] and latest_timelines(run, 2) == found
    assert read == [1, 2]
    run.journal.put_value(run.run_id, RunValue.TIMELINES, {"2": {"half": "written"}})
    assert latest_timelines(run, 2) == found and read == [1, 2, 1, 2], "what is damaged is computed anew"


def test_a_run_that_is_only_read_keeps_nothing(run: Run, make_trace: MakeTrace) -> None:
    play(run, 1, make_trace)
    (found,) = latest_timelines(Run(run.config, is_read_only=True), 1)
    assert found.seconds == 100 and run.journal.value(run.run_id, RunValue.TIMELINES) is None


def test_the_timelines_that_are_kept_are_the_last_ones(run: Run) -> None:
    for k in range(1, NUM_KEPT + 3):
        play(run, k, None)
    assert [t.iteration for t in latest_timelines(run, NUM_KEPT + 2)] == list(range(3, NUM_KEPT + 3))
    kept = run.journal.value(run.run_id, RunValue.TIMELINES)
    assert kept is not None and len(kept) == NUM_KEPT


def test_the_report_says_the_largest_waits_and_the_trace_has_the_iterations(run: Run, make_trace: MakeTrace) -> None:
    for k in range(1, 6):
        play(run, k, make_trace)
    written = write_reports(run)
    report, paths = written.report, written.paths
    assert [wait["sentence"] for wait in report["waits"]] == [
        "engines waited 250.0 s (50% of iterations 1 to 5): the trainer of model group team was at work",
        "engines and trainers waited 145.0 s (29% of iterations 1 to 5): collect was at work around its episodes",
        "trainers waited 37.5 s (8% of iterations 1 to 5): engines were at work (collect)",
    ]
    page = Path(paths["report.html"]).read_text()
    assert "Engines waited 250.0 s (50% of iterations 1 to 5)" in page and "<th>tool search</th>" in page
    trace = json.loads(Path(paths["timeline.json"]).read_text())
    slices = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].startswith("iteration ")]
    assert slices == [f"iteration {k}" for k in range(1, 6)]


def test_where_iterations_overlap_each_has_what_was_done_until_its_end(run: Run, make_trace: MakeTrace) -> None:
    lagging = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 1})}))
    for k in (1, 2):
        play(lagging, k, make_trace)
    began = BEGAN + 1000
    # The second is collected from 45 s after the first began to 85 s, in its training, and trained from 90 s to 140 s.
    for stage, begin, end in (("collect", 45, 85), ("score", 86, 87), ("train", 90, 140), ("sync", 140, 150)):
        change(lagging, 2, stage, started_at=began + begin, ended_at=began + end)
    for stage in ("evaluate", "promote"):
        change(lagging, 2, stage, started_at=began + 150, ended_at=began + 150)
    first, second = read_timeline(lagging, 1), read_timeline(lagging, 2)
    assert first is not None and second is not None
    assert [s.label for s in first.stages][:6] == [
        "collect 1",
        "score 1",
        "train 1 team",
        "collect 2",
        "score 2",
        "train 2 team",
    ]
    assert (first.start_s - began, first.end_s - began) == (0, 100)
    assert [(s.start_s - began, s.end_s - began) for s in first.lanes["trainer team"]] == [
        (43, 93),
        (90, 100),
    ]
    assert [s.label for s in second.stages] == ["train 2 team", "sync 2", "evaluate 2", "promote 2"]
    assert (second.start_s - began, second.end_s - began) == (100, 150)
    assert [(s.start_s - began, s.end_s - began) for s in second.lanes["trainer team"]] == [(100, 140)]
    assert sum(t.seconds for t in (first, second)) == 150, "no moment counts twice"
    figures = [figures_of_iteration(lagging, k) for k in (1, 2)]
    assert [each and each["seconds"]["total"] for each in figures] == [100, 50]


def test_what_goes_on_after_an_iteration_ended_is_kept_when_it_is_done(run: Run, make_trace: MakeTrace) -> None:
    lagging = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 1})}))
    play(lagging, 1, make_trace)
    began = BEGAN + 1000
    finish(lagging, 2, collected(policy_versions={TEAM: 0}))
    finish(lagging, 2, scored())
    finish(lagging, 2, trained(TEAM, 2, parts={"learn": (began + 96, began + 139)}), TEAM)
    for stage, begin, end in (("collect", 45, 85), ("score", 93, 94)):
        change(lagging, 2, stage, started_at=began + begin, ended_at=began + end)
    change(lagging, 2, "train", started_at=began + 94, status="running", ended_at=None, expires_at=time.time() + 60)

    def of_training() -> tuple[float, str]:
        """Seconds that the trainer worked in iteration 1, and what the second training is called there."""
        (found,) = latest_timelines(lagging, 1)
        return found.at_work["trainer team"], [s.label for s in found.stages if s.stage == "train"][1]

    assert of_training() == (50 + 6, "train 2 team (running)"), "the whole stage counts as the trainer's work"
    assert not run.journal.value(run.run_id, RunValue.TIMELINES), "it is not known for good"
    change(lagging, 2, "train", status="done", ended_at=began + 140)
    assert of_training() == (50 + 4, "train 2 team")
    assert list(run.journal.value(run.run_id, RunValue.TIMELINES) or ()) == ["1"]


def test_an_iteration_of_which_all_was_done_before_the_last_one_ended_has_no_time_yet(run: Run) -> None:
    lagging = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 1})}))
    play(lagging, 1, None)
    finish(lagging, 2, collected(policy_versions={TEAM: 0}))
    change(lagging, 2, "collect", started_at=BEGAN + 1050, ended_at=BEGAN + 1060)
    assert read_timeline(lagging, 2) is None
