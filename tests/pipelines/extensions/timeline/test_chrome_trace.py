"""timeline.json is what Perfetto and chrome://tracing read: named threads whose slices do not overlap, in microseconds, and counters."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest

from pipelines.extensions.timeline.chrome_trace import chrome_trace
from pipelines.extensions.timeline.timeline import Span, StageTime, Timeline, iteration_timeline

pytestmark = pytest.mark.fast

BEGAN = 1_795_775_087.0


def iteration(number: int, begin: float) -> Timeline:
    """Ten seconds of collect, then two trainers side by side, of which one was begun anew after a pause."""
    stages = [
        StageTime(stage="collect", start_s=begin, end_s=begin + 10),
        StageTime(stage="train", model_group="a", start_s=begin + 10, end_s=begin + 14),
        StageTime(stage="train", model_group="b", start_s=begin + 10, end_s=begin + 12),
        StageTime(stage="train", model_group="c", start_s=begin + 20, end_s=begin + 23, attempt=2),
    ]
    calls = {
        "engine a": np.array([[begin + 1, begin + 4], [begin + 2, begin + 9]]),
        "collectors": np.array([[begin + 1, begin + 9.5]]),
    }
    parts = [Span(begin + 10, begin + 13, "learn"), Span(begin + 13, begin + 14, "store")]
    return iteration_timeline(number, stages, trainers={"a": parts}, engines=["a"], calls=calls)


def trace(*timelines: Timeline) -> dict[str, Any]:
    return json.loads(json.dumps(chrome_trace("demo", timelines), allow_nan=False))


def slices(found: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """By name of the thread: name, begin and length in seconds."""
    events = found["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    own = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["tid"], e["ts"]))
    return {
        names[thread]: [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in each]
        for thread, each in groupby(own, key=lambda e: e["tid"])
    }


def test_each_lane_is_a_thread_and_times_are_microseconds_since_the_first_begin() -> None:
    found = trace(iteration(1, BEGAN), iteration(2, BEGAN + 100))
    assert found["otherData"] == {"run": "demo", "began_at": BEGAN}
    threads = slices(found)
    assert list(threads) == [
        "iterations",
        "stage collect",
        "stage train a",
        "stage train b",
        "stage train c",
        "engine a",
        "trainer a",
        "collectors",
    ]
    assert threads["iterations"] == [("iteration 1", 0, 23), ("iteration 2", 100, 23)]
    assert threads["engine a"] == [("calls", 1, 8), ("calls", 101, 8)]
    assert threads["trainer a"][:2] == [("learn", 10, 3), ("store", 13, 1)]


def test_slices_of_a_thread_do_not_overlap() -> None:
    threads = slices(trace(iteration(1, BEGAN), iteration(2, BEGAN + 23)))
    assert threads["stage collect"][0] == ("collect", 0, 10)
    assert threads["stage train a"][0] == ("train a", 10, 4) and threads["stage train c"][0] == (
        "train c, attempt 2",
        20,
        3,
    )
    for name, each in threads.items():
        assert all(first[1] + first[2] <= second[1] + 1e-6 for first, second in pairwise(each)), name


def test_stages_that_overlap_are_in_threads_of_their_own() -> None:
    stages = [
        StageTime(stage="collect", iteration=3, start_s=BEGAN + 23, end_s=BEGAN + 33),
        StageTime(stage="train", iteration=2, start_s=BEGAN + 25, end_s=BEGAN + 35),
    ]
    overlapping = iteration_timeline(2, stages, trainers={}, engines=["a"], calls=None)
    threads = slices(trace(iteration(1, BEGAN), overlapping))
    assert threads["stage collect"] == [("collect", 0, 10), ("collect 3", 23, 10)]
    assert threads["stage train"] == [("train 2", 25, 10)]
    for name, each in threads.items():
        assert all(first[1] + first[2] <= second[1] + 1e-6 for first, second in pairwise(each)), name


def test_counters_say_how_many_calls_there_are_at_once_and_end_at_none() -> None:
    events = [e for e in trace(iteration(1, BEGAN))["traceEvents"] if e["ph"] == "C"]
    of_engine = [(e["ts"] / 1e6, e["args"]["number"]) for e in events if e["name"] == "engine a: at once"]
    assert of_engine[0] == (0, 0) and of_engine[-1][1] == 0
    assert max(number for _, number in of_engine) == 2
    assert {number for time, number in of_engine if 4.2 < time < 8.8} <= {1.0}
    assert all(a[1] != b[1] for a, b in pairwise(of_engine)), "only changes are written"


def test_a_run_without_iterations_has_a_trace_without_slices() -> None:
    found = trace()
    assert slices(found) == {} and found["otherData"]["began_at"] == 0
