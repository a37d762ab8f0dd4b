"""What the page draws of an iteration: positions in proportion to time, labels where they fit, few enough rows."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.report.figures import work
from pipelines.report.timeline import Calls, Kind, Lane, Span, StageTime, Timeline, iteration_timeline
from pipelines.report.timeline_chart import BAR_HEIGHT, LEFT, MOST_TOOLS, RIGHT, timeline_chart
from pipelines.report.waits import account

pytestmark = pytest.mark.fast

STAGES = (
    StageTime(stage="collect", start_s=0, end_s=60),
    StageTime(stage="score", start_s=60, end_s=60.5),
    StageTime(stage="train", model_group="a", start_s=61, end_s=100),
)
PARTS = [Span(61, 62, "read"), Span(62, 99, "learn"), Span(99, 100, "store")]


def played(calls: Calls | None = None, number: int = 3) -> Timeline:
    calls = {Lane(Kind.ENGINE, "a"): np.array([[0, 50], [25, 50]])} if calls is None else calls
    return iteration_timeline(number, STAGES, trainers={"a": PARTS}, engines=["a"], calls=calls)


def test_bars_are_where_the_time_is_and_the_rest_of_a_row_is_waiting() -> None:
    chart = timeline_chart(played())
    rows = {row.label: row for row in chart.rows}
    assert list(rows) == ["stages", "engine a", "trainer a", "collectors"] and chart.title == "Iteration 3, 100.0 s"
    (bar,) = rows["engine a"].bars
    assert (bar.x, bar.width) == (LEFT, (RIGHT - LEFT) / 2)
    assert rows["engine a"].note == "50.0 s (50%), up to 2 calls"
    assert rows["engine a"].gaps == [((LEFT + 3 * RIGHT) / 4, "waits 50.0 s")]
    assert [bar.label for bar in rows["trainer a"].bars] == ["", "learn 37.0 s", ""], "what does not fit is left out"
    assert rows["trainer a"].bars[0].title == "read: 1.00 s, from 61.00 s on"
    assert rows["stages"].note == "0.50 s between them"
    assert rows["collectors"].bars == [] and rows["collectors"].area == ""


def test_the_area_is_as_high_as_a_bar_where_most_calls_are_at_once() -> None:
    (row,) = [row for row in timeline_chart(played()).rows if row.label == "engine a"]
    heights = {float(step.partition("h")[0]) for step in row.area[1:-1].split("V")[1:-1]}
    assert heights == {row.y, row.y + BAR_HEIGHT / 2, row.y + BAR_HEIGHT}


def test_stages_that_overlap_have_rows_of_engines_and_of_trainers() -> None:
    times = [
        ("collect", 3, 0, 10),
        ("train", 2, 2, 12),
        ("train", 3, 12.5, 20),
        ("evaluate", 2, 13, 19),
        ("promote", 2, 18, 20),
    ]
    stages = [StageTime(stage=name, iteration=k, start_s=start, end_s=end) for name, k, start, end in times]
    chart = timeline_chart(iteration_timeline(2, stages, trainers={}, engines=["a"], calls=None))
    assert {row.label: [bar.title.partition(":")[0] for bar in row.bars] for row in chart.rows} == {
        "stages of engines": ["collect 3", "evaluate 2"],
        "stages of engines 2": ["promote 2"],
        "stages of trainers": ["train 2", "train 3"],
    }
    assert [row.note for row in chart.rows] == ["0.50 s between them", "", ""]
    assert len(chart.borders) == 5 and len({row.y for row in chart.rows}) == 3


def test_the_time_axis_has_round_numbers() -> None:
    assert [label for _, label in timeline_chart(played()).ticks] == ["0 s", "20 s", "40 s", "60 s", "80 s", "100 s"]


def test_only_the_tools_that_worked_most_have_a_row_and_the_others_are_counted() -> None:
    calls = {Lane(Kind.TOOL, f"tool{n}"): np.array([[0, n + 1.0]]) for n in range(MOST_TOOLS + 2)}
    chart = timeline_chart(played(calls))
    labels = [row.label for row in chart.rows if row.label.startswith("tool")]
    assert labels == [f"tool tool{n}" for n in range(2, MOST_TOOLS + 2)] and chart.note == "2 more tools worked less."


def test_an_iteration_without_traces_says_so() -> None:
    timeline = iteration_timeline(3, STAGES, trainers={"a": PARTS}, engines=["a"], calls=None)
    chart = timeline_chart(timeline)
    assert [row.label for row in chart.rows] == ["stages", "trainer a"]
    assert chart.note == "No traces of it are stored: engines, tools and collectors are unknown."


def test_the_bars_of_all_iterations_are_as_high_as_these_took_seconds() -> None:
    rows = [{"iteration": k, "time": account(played(number=k))} for k in (1, 2)]
    bars, shares = work(rows)
    heights = {bar["name"]: bar["y"] for bar in bars.data}
    assert heights == {
        "engines": [50, 50],
        "trainers": [39, 39],
        "rest of the stages": [10.5, 10.5],
        "between stages": [0.5, 0.5],
    }
    assert {line["name"]: line["y"] for line in shares.data} == {
        "engine a": [0.5, 0.5],
        "trainer a": [0.39, 0.39],
        "collectors": [0.0, 0.0],
    }
    assert work([{"iteration": 1}]) == []
