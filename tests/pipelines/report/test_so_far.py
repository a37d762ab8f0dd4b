"""What the report needs of all iterations so far stays small, and loses neither the first, the last nor an extreme."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from pipelines.report.charts import other_metrics, training
from pipelines.report.page import ReportData, render
from pipelines.report.summaries import MOST_DRAWN, MOST_EVENTS, MOST_THINNED, Drawn, SoFar
from pipelines.report.training_warnings import TrainingWarning, compared_iterations

pytestmark = pytest.mark.fast

MOST_BYTES = 8_000_000
"""Of the page, whatever the number of iterations."""


def row(k: int, *, every: int = 1, warnings: tuple[TrainingWarning, ...] = (), **figures: float) -> dict[str, Any]:
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
    judged = {
        "candidate": interval,
        "champion": interval,
        "gain": None,
        "verdict": "reject",
        "condition": "",
        "num_tasks": 8,
    }
    names = [f"train/figure_{i}" for i in range(40)]
    return {
        "iteration": k,
        "metrics": {"outcome": 0.5, "reward": 0.5, "sync_seconds": k / 1000, "overhead_share": 0.1},
        "agents": {
            f"agent{a}": {"reward": 0.1, "format": 0.9, **{n: 0.123456789 + k for n in names}} for a in range(4)
        },
        "groups": {f"group{g}": {**dict.fromkeys(names, 0.987654321 + k), **figures} for g in range(2)},
        "trained_agents": {},
        "funnel": {"agent0": {"calls": 10, "scored": 8, "trained": 5}},
        "failed_groups": {},
        "seconds": {"collect": 1.0, "train": 2.0, "total": 3.5},
        "evaluation": None if k % every else judged,
        "versions": {"group0": k, "group1": k},
        "source": None,
        "warnings": list(warnings),
    }


def added(rows: list[dict[str, Any]]) -> SoFar:
    so_far = SoFar()
    for each in rows:
        so_far.add(each)
    return SoFar.from_json(json.loads(json.dumps(so_far.to_json())))


def test_every_iteration_is_drawn_up_to_the_limit_then_evenly_spaced_ones() -> None:
    drawn = Drawn()
    for k in range(1, 10_001):
        drawn.add(k)
        assert len(drawn.numbers) <= MOST_DRAWN and drawn.numbers[0] == 1
        assert len(drawn.numbers) == k or MOST_THINNED // 2 <= len(drawn.numbers) <= MOST_THINNED
        if k == MOST_DRAWN:
            assert drawn.numbers == list(range(1, k + 1))
    assert {b - a for a, b in pairwise(drawn.numbers)} == {drawn.stride} == {128}


def test_the_first_the_last_and_both_extremes_of_each_line_are_drawn() -> None:
    rows = [row(k, every=3, **{"train/kl_k3": 9.0 if k == 538 else 0.001 if k == 713 else 0.1}) for k in range(1, 1000)]
    best, promoted = {"mean": 0.9, "low": 0.8, "high": 1.0}, 704  # neither is among the evenly spaced ones
    rows[700]["evaluation"] = {**rows[2]["evaluation"], "candidate": best}
    rows[promoted - 1]["evaluation"] = {**rows[2]["evaluation"], "verdict": "promote"}
    rows[776]["seconds"] = {"collect": 1.0, "train": 99.0, "total": 100.0}
    so_far = added(rows)
    numbers = so_far.numbers_to_draw()
    assert numbers[0] == 1 and numbers[-1] == 999 and 777 in numbers, "the slowest has its bar"
    assert {701, promoted} <= set(numbers), "the best of the gate, and who was promoted"
    assert len(numbers) <= 2 * MOST_THINNED + 6
    shown = [rows[k - 1] for k in numbers]
    lines = sorted([*shown, *so_far.extreme_rows()], key=lambda r: r["iteration"])
    (kl,) = [chart for chart in training(lines) if chart.title == "KL of the update"]
    points = dict(zip(kl.data[0]["x"], kl.data[0]["y"], strict=True))
    assert points[538] == 9.0 and points[713] == 0.001 and points[1] == points[999] == 0.1
    assert all(None not in line["y"] for chart in [*training(lines), *other_metrics(lines)] for line in chart.data)
    assert sum(bool(rows[k - 1]["evaluation"]) for k in numbers) >= MOST_THINNED // 2


def test_sums_are_over_all_iterations_and_lists_are_bounded() -> None:
    told = TrainingWarning(kind="collapse", where="agent a", figure="entropy", iteration=0, what="gone", try_="more")
    rows = [row(k, warnings=(told,) if k % 2 else ()) for k in range(1, 601)]
    for each in rows:
        each["failed_groups"] = {"group0": "out of memory"}
        each["source"] = "other@3"
    so_far = added(rows)
    assert so_far.num_iterations == 600 and so_far.seconds == {"collect": 600.0, "train": 1200.0, "total": 2100.0}
    assert so_far.sync_seconds == 0.6 and so_far.gap_max is None, "no gap was measured"
    assert so_far.num_warnings == 300 and so_far.shown_warnings() == [told] * MOST_EVENTS
    assert list(so_far.failed_groups)[-1] == "600" and len(so_far.failed_groups) == MOST_EVENTS
    assert so_far.notes["failed"][-1] == "Iteration 600: model group group0 kept version 600, out of memory"
    assert so_far.notes["source"][-1] == "600 (other@3)"


def test_a_warning_that_stays_is_listed_once() -> None:
    told = TrainingWarning(kind="hacking", where="team", figure="outcome", iteration=2, what="", try_="")
    so_far = added([row(1), row(2, warnings=(told,)), row(3, warnings=(told,)), row(4), row(5, warnings=(told,))])
    assert so_far.num_warnings == 2
    assert [asdict(w) for w in so_far.shown_warnings()] == [asdict(told)] * 2


def test_what_is_kept_does_not_grow() -> None:
    rows = [row(k) for k in range(1, 1201)]
    assert len(json.dumps(added(rows).to_json())) < 1.5 * len(json.dumps(added(rows[:300]).to_json()))


def test_the_page_of_a_long_run_is_small() -> None:
    rows = [row(k) for k in range(1, 1001)]
    so_far = added(rows)
    data = ReportData(
        run_id="long",
        headline={},
        iterations=[rows[k - 1] for k in so_far.numbers_to_draw()],
        extremes=so_far.extreme_rows(),
        num_iterations=so_far.num_iterations,
        warnings=so_far.shown_warnings(),
        num_warnings=300,
    )
    page = render(data)
    assert len(page.encode()) < MOST_BYTES and page.count("Plotly.register") <= 1
    assert (
        "of 1000 iterations: the first, the last, the latest promotions" in page and "and 300 earlier ones" not in page
    )


def test_what_an_iteration_is_compared_with_is_bounded_and_reaches_back_to_the_first() -> None:
    assert compared_iterations(1) == []
    for k in (2, 10, 65):
        assert compared_iterations(k) == list(range(1, k))
    for k in (66, 200, 1000, 100_000):
        compared = compared_iterations(k)
        assert compared[:4] == [1, 2, 3, 4] and compared[-64:] == list(range(k - 64, k)) and len(compared) <= 132
        gaps = [b - a for a, b in pairwise(compared)]
        assert max(gaps) <= 2 * k / 64
