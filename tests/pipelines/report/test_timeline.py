"""Times of stages, trainers and calls become lanes: overlaps count once, and what lies outside of the iteration is left out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipelines.report.kept_timelines import stage_time
from pipelines.report.timeline import (
    NUM_PIECES,
    Calls,
    Kind,
    Lane,
    Span,
    StageTime,
    Timeline,
    iteration_timeline,
    mean_number,
    trainer_spans,
    union,
)
from stores.journal.journal import RUNNING, StageRow

pytestmark = pytest.mark.fast

ENGINE, COLLECTORS, SEARCH = Lane(Kind.ENGINE, "a"), Lane(Kind.COLLECTORS), Lane(Kind.TOOL, "search")


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


def test_an_engine_that_had_nothing_to_do_has_an_empty_lane() -> None:
    found = timeline({COLLECTORS: intervals((1, 2))}, stage("collect", 0, 3))
    assert found.lanes == {ENGINE: (), COLLECTORS: (Span(1, 2, "calls"),)}


def test_what_lies_outside_of_the_iteration_is_left_out() -> None:
    calls = {ENGINE: intervals((-900, -890), (95, 105), (140, 170)), SEARCH: intervals((-5, -4))}
    found = timeline(calls, stage("collect", 100, 120), stage("score", 120, 150))
    assert found.lanes[ENGINE] == (Span(100, 105, "calls"), Span(140, 150, "calls"))
    assert found.lanes[SEARCH] == ()
    assert (found.start_s, found.end_s, found.seconds) == (100, 150, 50)


def test_without_traces_there_is_no_lane_of_an_engine_a_tool_or_the_collectors() -> None:
    found = timeline(None, stage("train", 0, 4, "a"), trainers={"a": [Span(0, 4, "train")]})
    assert list(found.lanes) == [Lane(Kind.TRAINER, "a")] and not found.has_calls


def test_engines_come_first_then_trainers_collectors_and_tools() -> None:
    calls = {SEARCH: intervals((0, 1)), COLLECTORS: intervals((0, 2)), ENGINE: intervals((1, 2))}
    found = timeline(calls, stage("collect", 0, 3), trainers={"b": [], "a": []})
    trainers = [Lane(Kind.TRAINER, "b"), Lane(Kind.TRAINER, "a")]
    assert list(found.lanes) == [ENGINE, *trainers, COLLECTORS, SEARCH]


def test_a_trainer_without_parts_is_at_work_for_the_whole_stage() -> None:
    assert trainer_spans(stage("train", 5, 9, "a"), {"a": None}) == {"a": [Span(5, 9, "train")]}
    assert trainer_spans(stage("train", 5, 9, "team"), {}) == {"team": [Span(5, 9, "train")]}


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


def test_a_repeated_stage_and_one_of_a_ray_job_are_known_as_such() -> None:
    found = stage_time(row(token=3, owner="Ray job x", stage="train", model_group="a"), now=0.0)
    assert found.is_job and found.label == "train a, attempt 3"
    assert not stage_time(row(), now=0.0).is_job


def test_a_timeline_comes_back_from_json_to_the_millisecond() -> None:
    calls = {
        ENGINE: intervals((1_795_775_087.1234, 1_795_775_088.5)),
        COLLECTORS: intervals((1_795_775_087.0, 1_795_775_089.0)),
    }
    stages = (
        stage("collect", 1_795_775_087.0, 1_795_775_090.0),
        stage("train", 1_795_775_090.5, 1_795_775_092.0, "a", attempt=2),
    )
    found = timeline(calls, *stages, trainers={"a": [Span(1_795_775_090.5, 1_795_775_092.0, "learn")]})
    back = Timeline.from_json(json.loads(json.dumps(found.to_json())))
    assert back.stages == found.stages and back.has_calls and list(back.lanes) == list(found.lanes)
    assert back.lanes[ENGINE][0].start_s == pytest.approx(1_795_775_087.123, abs=1e-6)
    assert back.at_once[ENGINE] == pytest.approx(found.at_once[ENGINE], abs=0.005)
    assert len(back.at_once[COLLECTORS]) == NUM_PIECES and Lane(Kind.TRAINER, "a") not in back.at_once


def test_gaps_that_could_not_be_seen_are_closed_but_not_those_between_parts() -> None:
    calls = {ENGINE: intervals((0, 10), (10.01, 20), (30, 40))}
    trainers = {"a": [Span(50, 60, "learn"), Span(60.01, 70, "store")]}
    found = timeline(calls, stage("collect", 0, 50), stage("train", 50, 100, "a"), trainers=trainers)
    kept = found.without_short_gaps()
    assert kept.lanes[ENGINE] == (Span(0, 20, "calls"), Span(30, 40, "calls"))
    assert kept.lanes[Lane(Kind.TRAINER, "a")] == tuple(trainers["a"])
    assert len(found.lanes[ENGINE]) == 3, "what is added up is exact"
