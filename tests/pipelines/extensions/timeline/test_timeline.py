"""Times of stages, trainers and calls become lanes and waits: literal times in, seconds and words out; overlaps count once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipelines.extensions.timeline.report import TEMPLATE
from pipelines.extensions.timeline.timeline import (
    _KEPT,
    NUM_PIECES,
    Calls,
    Span,
    StageTime,
    Timeline,
    iteration_timeline,
    largest_waits,
    mean_number,
    stage_time,
    trainer_spans,
    union,
    work_of_lanes,
)
from pipelines.report.page import section
from stores.journal.journal import RUNNING, StageRow

pytestmark = pytest.mark.fast

ENGINE, COLLECTORS, SEARCH = "engine a", "collectors", "tool search"


def stage(name: str, start: float, end: float, group: str = "", **changes: Any) -> StageTime:
    return StageTime(**{"stage": name, "model_group": group, "start_s": start, "end_s": end, **changes})


def intervals(*times: tuple[float, float]) -> np.ndarray:
    return np.array(times, dtype=np.float64).reshape(-1, 2)


def timeline(calls: Calls | None, *stages: StageTime, trainers: dict[str, list[Span]] | None = None) -> Timeline:
    return iteration_timeline(3, stages, trainers=trainers or {}, engines=["a"], calls=calls)


def test_calls_that_overlap_or_touch_are_one_interval() -> None:
    assert union(intervals((5, 6), (1, 4), (2, 3), (4, 4.5))).tolist() == [[1, 4.5], [5, 6]]
    assert union(intervals()).tolist() == []


def test_the_number_at_once_is_the_mean_over_each_piece() -> None:
    # Two calls at once in the first second, one in the first half of the second, none after.
    assert mean_number(intervals((10, 11), (10, 11.5)), 10, 14, 4).tolist() == [2, 0.5, 0, 0]
    assert mean_number(intervals(), 10, 14, 2).tolist() == [0, 0]


def test_what_lies_outside_of_the_iteration_is_left_out() -> None:
    calls = {ENGINE: intervals((-900, -890), (95, 105), (140, 170)), SEARCH: intervals((-5, -4))}
    found = timeline(calls, stage("collect", 100, 120), stage("score", 120, 150))
    assert found.lanes[ENGINE] == (Span(100, 105, "calls"), Span(140, 150, "calls"))
    assert found.lanes[SEARCH] == ()
    assert (found.start_s, found.end_s, found.seconds) == (100, 150, 50)


def test_engines_come_first_then_trainers_collectors_and_tools() -> None:
    calls = {SEARCH: intervals((0, 1)), COLLECTORS: intervals((0, 2)), ENGINE: intervals((1, 2))}
    found = timeline(calls, stage("collect", 0, 3), trainers={"b": [], "a": []})
    trainers = ["trainer b", "trainer a"]
    assert list(found.lanes) == [ENGINE, *trainers, COLLECTORS, SEARCH]


def test_parts_of_training_are_cut_to_their_stage() -> None:
    parts = {"load": (1.0, 2.0), "read": (4.0, 6.0), "learn": (6.0, 8.0), "store": (8.0, 9.5)}
    found = trainer_spans(stage("train", 5, 9, "team"), {"team": None, "a": parts})
    assert found == {"a": [Span(5, 6, "read"), Span(6, 8, "learn"), Span(8, 9, "store")]}


def row(**changes: Any) -> StageRow:
    fields: dict[str, Any] = {"run_id": "r", "iteration": 3, "stage": "collect", "model_group": "", "status": "done"}
    fields |= {"token": 1, "owner": "host:1", "process": "p", "expires_at": 60.0, "started_at": 10.0, "ended_at": 20.0}
    return StageRow(**{**fields, "seconds": 10.0, "ref": None, "error": "", **changes})


def test_a_running_stage_lasts_until_now_and_one_whose_process_is_gone_until_its_lease_ended() -> None:
    running = row(status=RUNNING, ended_at=None)
    assert stage_time(running, now=45.0).end_s == 45.0
    assert stage_time(running, now=900.0).end_s == 60.0
    assert stage_time(running, now=45.0).label == "collect (running)"
    assert stage_time(row(), now=45.0).end_s == 20.0


def test_a_timeline_comes_back_from_json_as_it_was() -> None:
    calls = {ENGINE: intervals((0, 1.5)), COLLECTORS: intervals((0, 2))}
    stages = stage("collect", 0, 3), stage("train", 3.5, 5, "a", attempt=2)
    found = timeline(calls, *stages, trainers={"a": [Span(3.5, 5, "learn")]})
    assert _KEPT.validate_python(json.loads(json.dumps(_KEPT.dump_python({3: found}, mode="json")))) == {3: found}
    assert len(found.at_once[COLLECTORS]) == NUM_PIECES and "trainer a" not in found.at_once


def test_gaps_that_could_not_be_seen_are_closed_but_not_those_between_parts_and_all_count() -> None:
    calls = {ENGINE: intervals((0, 10), (10.01, 20), (30, 40))}
    trainers = {"a": [Span(50, 60, "learn"), Span(60.01, 70, "store")]}
    found = timeline(calls, stage("collect", 0, 50), stage("train", 50, 100, "a"), trainers=trainers)
    assert found.lanes[ENGINE] == (Span(0, 20, "calls"), Span(30, 40, "calls"))
    assert found.lanes["trainer a"] == tuple(trainers["a"])
    assert found.at_work == {ENGINE: pytest.approx(29.99), COLLECTORS: 0, "trainer a": pytest.approx(19.99)}


# ---- who waited for whom

Times = list[tuple[float, float]]


def played(
    *stages: StageTime,
    engines: dict[str, Times] | None = None,
    trainers: dict[str, Times] | None = None,
    tools: dict[str, Times] | None = None,
    collectors: Times | None = None,
    iteration: int = 1,
) -> Timeline:
    """A timeline; without `engines` no traces of it are stored."""
    calls = None
    if engines is not None:
        calls = {f"engine {name}": intervals(*times) for name, times in engines.items()}
        calls |= {f"tool {name}": intervals(*times) for name, times in (tools or {}).items()}
        calls[COLLECTORS] = intervals(*(collectors or []))
    spans = {name: [Span(*time, "train") for time in times] for name, times in (trainers or {}).items()}
    return iteration_timeline(iteration, stages, trainers=spans, engines=list(engines or ()), calls=calls)


def seconds_of(found: Timeline) -> dict[tuple[str, str], float]:
    """Seconds by who waits and for what."""
    return {(wait.who, wait.waited_for): round(wait.seconds, 6) for wait in found.waits}


BOTH = "engines and trainers"
STAGES = stage("collect", 0, 40), stage("score", 40, 42), stage("train", 42, 72, "a"), stage("sync", 72, 75)


def test_engines_wait_for_the_trainer_and_trainers_for_the_engines() -> None:
    found = played(*STAGES, engines={"a": [(2, 30), (10, 38)]}, trainers={"a": [(42, 72)]}, collectors=[(2, 38)])
    assert seconds_of(found) == {
        ("trainers", "engines were at work (collect)"): 36,
        ("engines", "the trainer of model group a was at work"): 30,
        (BOTH, "collect was at work around its episodes"): 4,
        (BOTH, "sync was at work"): 3,
        (BOTH, "score was at work"): 2,
    }
    assert found.at_work == {"engine a": 36, "trainer a": 30, "collectors": 36}


def test_of_two_trainers_the_one_that_works_most_is_waited_for_and_one_waits_for_the_other() -> None:
    stages = stage("train", 0, 4, "a"), stage("train", 0, 10, "b")
    found = played(*stages, engines={"a": []}, trainers={"a": [(0, 4)], "b": [(1, 10)]})
    assert seconds_of(found) == {
        ("engines", "the trainer of model group b was at work"): 9,
        ("engines", "the trainer of model group a was at work"): 1,
        ("the trainer of model group a", "another trainer was at work"): 6,
        ("the trainer of model group b", "another trainer was at work"): 1,
    }


def test_an_idle_engine_waits_for_the_engine_that_is_at_work() -> None:
    found = played(stage("collect", 0, 10), engines={"a": [(0, 6)], "b": [(4, 10)]}, trainers={"a": []})
    assert seconds_of(found) == {
        ("trainers", "engines were at work (collect)"): 10,
        ("the engine of a", "another engine was at work"): 4,
        ("the engine of b", "another engine was at work"): 4,
    }


def test_engines_wait_for_a_tool_then_for_what_lies_between_calls_then_for_the_stage() -> None:
    found = played(
        stage("collect", 0, 10),
        engines={"a": [(1, 3)]},
        tools={"search": [(2, 6)], "world": [(4, 7)]},
        collectors=[(1, 9)],
    )
    assert seconds_of(found) == {
        ("engines", "tool search was at work (collect)"): 3,
        ("engines", "tool world was at work (collect)"): 1,
        ("engines", "episodes were between two calls (collect)"): 2,
        ("engines", "collect was at work around its episodes"): 2,
    }


def test_between_two_stages_all_wait_for_the_next_one() -> None:
    jobs = [stage(name, 20 * i, 20 * i + 9) for i, name in enumerate(("collect", "score", "sync"))]
    found = played(*jobs, engines={"a": []})
    assert seconds_of(found)["engines", "the next stage had not begun"] == 22
    assert largest_waits([found], 1)[0]["sentence"] == (
        "engines waited 22.0 s (45% of iteration 1): the next stage had not begun"
    )


def test_where_no_traces_are_stored_nothing_is_said_of_engines() -> None:
    found = played(*STAGES, trainers={"a": [(42, 72)]})
    assert found.at_work == {"trainer a": 30}
    assert seconds_of(found) == {
        ("trainers", "collect was at work"): 40,
        ("trainers", "sync was at work"): 3,
        ("trainers", "score was at work"): 2,
    }


def test_work_and_waits_of_a_lane_are_all_seconds_whatever_happened() -> None:
    random = np.random.default_rng(0)
    engines: dict[str, Any] = {n: np.sort(random.uniform(0, 50, (40, 2)), axis=1).tolist() for n in ("a", "b", "c")}
    tools: dict[str, Any] = {"search": np.sort(random.uniform(0, 50, (30, 2)), axis=1).tolist()}
    stages = [stage("collect", 0, 45.5), stage("train", 46, 60, "a"), stage("train", 46.25, 58, "b", attempt=2)]
    trainers = {"a": [(46.5, 59.0)], "b": [(47.0, 50.0), (50.5, 58.0)]}
    found = played(*stages, engines=engines, tools=tools, trainers=trainers, collectors=[(0.5, 45)])
    for lane in ("engine a", "engine b", "engine c", "trainer a", "trainer b"):
        kind, _, name = lane.partition(" ")
        own = (f"{kind}s", BOTH, f"the {kind} of {name}", f"the {kind} of model group {name}")
        waited = sum(wait.seconds for wait in found.waits if wait.who in own)
        assert found.at_work[lane] + waited == pytest.approx(60), lane


def test_a_stage_that_is_still_running_is_waited_for_until_now() -> None:
    stages = stage("collect", 0, 5), stage("train", 5, 25, "a", status="running")
    found = played(*stages, trainers={"a": [(5, 25)]})
    assert seconds_of(found) == {("trainers", "collect was at work"): 5} and found.seconds == 25


def test_a_stage_that_took_no_time_is_nobodys_work() -> None:
    assert played(stage("collect", 3, 3), engines={"a": []}).waits == ()


def test_the_largest_waits_of_several_iterations_are_added_up() -> None:
    first = played(*STAGES, engines={"a": [(0, 40)]}, trainers={"a": [(42, 72)]}, iteration=3)
    assert [wait["sentence"] for wait in largest_waits([first], 2)] == [
        "trainers waited 40.0 s (53% of iteration 3): engines were at work (collect)",
        "engines waited 30.0 s (40% of iteration 3): the trainer of model group a was at work",
    ]
    stages = stage("collect", 0, 5), stage("train", 5, 30, "a")
    second = played(*stages, engines={"a": [(0, 5)]}, trainers={"a": [(5, 30)]}, iteration=4)
    assert [wait["sentence"] for wait in largest_waits([first, second], 2)] == [
        "engines waited 55.0 s (52% of iterations 3 to 4): the trainer of model group a was at work",
        "trainers waited 45.0 s (43% of iterations 3 to 4): engines were at work (collect)",
    ]
    assert largest_waits([]) == []


def test_the_share_of_a_lane_is_of_the_iterations_in_which_it_is_known() -> None:
    known = played(stage("collect", 0, 10), engines={"a": [(0, 4)]}, trainers={"a": []})
    unknown = played(stage("collect", 0, 30), trainers={"a": []}, iteration=2)
    assert work_of_lanes([known, unknown]) == {"engine a": (4, 0.4), "trainer a": (0, 0), "collectors": (0, 0)}


def test_names_of_lanes_and_waits_are_escaped() -> None:
    evil = "<img src=x>"
    html = section(TEMPLATE, waits=[f"engines waited for tool {evil}"], work={f"tool {evil}": (50.0, 0.5)})
    assert "<img" not in html and html.count("&lt;img") == 2
    assert "<li>Engines waited for tool" in html and "50%" in html
