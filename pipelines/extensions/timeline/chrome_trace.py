"""chrome_trace: timelines -> the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A thread per stage and per lane with a slice for all that is work without a pause, and a counter per engine, tool and collectors of how many
calls or episodes there were at once. Times are microseconds since the begin of the first iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipelines.extensions.timeline.timeline import Span, StageTime, Timeline, in_order

Event = dict[str, Any]
PROCESS = 1
ITERATIONS = 1
"""Thread of the iterations; those of their stages and of lanes follow."""


def chrome_trace(run_id: str, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Returns the trace of a run's iterations in Chrome's Trace Event Format; `began_at` is Unix seconds."""
    began = min((timeline.start_s for timeline in timelines), default=0.0)
    stages = dict.fromkeys(_row(stage) for timeline in timelines for stage in timeline.stages)
    lanes = in_order(lane for timeline in timelines for lane in timeline.lanes)
    threads = {label: thread for thread, label in enumerate(["iterations", *stages, *lanes], ITERATIONS)}
    events = [_named("process_name", 0, run_id)]
    for name, thread in threads.items():
        events += [_named("thread_name", thread, name), _named("thread_sort_index", thread, thread)]
    for timeline in timelines:
        iteration = Span(timeline.start_s, timeline.end_s, f"iteration {timeline.iteration}")
        events.append(_slice(iteration, ITERATIONS, began))
        for stage in timeline.stages:
            events.append(_slice(Span(stage.start_s, stage.end_s, stage.label), threads[_row(stage)], began))
        for lane, spans in timeline.lanes.items():
            events += [_slice(span, threads[lane], began) for span in spans]
            events += _counts(timeline, lane, began)
    return {"displayTimeUnit": "ms", "otherData": {"run": run_id, "began_at": began}, "traceEvents": events}


def _row(stage: StageTime) -> str:
    """Names the thread of a stage: its slices do not overlap, also where iterations do."""
    return f"stage {stage.stage} {stage.model_group}".rstrip()


def _named(kind: str, thread: int, value: str | int) -> Event:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": kind, "args": {key: value}}


def _slice(span: Span, thread: int, began: float) -> Event:
    start, end = round(1e6 * (span.start_s - began)), round(1e6 * (span.end_s - began))
    return {"ph": "X", "pid": PROCESS, "tid": thread, "name": span.what, "ts": start, "dur": end - start}


def _counts(timeline: Timeline, lane: str, began: float) -> Iterator[Event]:
    """Yields the number of calls at once where it changes, and 0 at the end."""
    at_once = timeline.at_once.get(lane, ())
    piece = timeline.seconds / max(len(at_once), 1)
    before = None
    for index, exact in enumerate([*at_once, *([0.0] if at_once else [])]):
        number = round(exact, 1)
        if number != before:
            time = round(1e6 * (timeline.start_s + index * piece - began))
            yield {
                "ph": "C",
                "pid": PROCESS,
                "name": f"{lane}: at once",
                "ts": time,
                "args": {"number": number},
            }
        before = number
